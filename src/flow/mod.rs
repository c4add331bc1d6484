//! Flow steering: which packets a queue pair receives, what is done with them, and how they are counted.
//!
//! A [`FlowRule`] names the headers to match (`matches`), and what becomes of the packets. Creating it on a
//! queue pair makes a flow (`flows`), which belongs to that queue pair. A rule may count into
//! [`FlowCounters`] and apply an [`EspAction`].

mod esp_action;
mod flow_counters;
mod flows;
mod matches;
mod rule;

pub use esp_action::{EspAction, EspFlags, EspParameters};
pub use flow_counters::{FlowCounter, FlowCounters};
pub use flows::FlowId;
pub(crate) use flows::Flows;
pub use matches::{
    EspMatch, EthernetMatch, GreMatch, HeaderMatch, Ipv4Match, Ipv6Match, MplsMatch, PortMatch,
    VxlanMatch,
};
pub use rule::{FlowFlags, FlowRule};
