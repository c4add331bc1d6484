//! Flow steering: which packets a queue pair receives, what the device does with them, and how it counts them.
//!
//! ```
//! use ibverbs::flow::{EthernetMatch, Ipv4Match, Rule};
//! use ibverbs::{QueuePair, Result};
//! use ibverbs::queue_pair::RawPacket;
//!
//! /// Takes the packets that this host sends to us.
//! fn listen(queue_pair: &mut QueuePair<'_, RawPacket>, us: [u8; 6], host: [u8; 4]) -> Result<()> {
//!     let from_host = Ipv4Match::new().source(host.into());
//!     let rule = Rule::new(1).matching(EthernetMatch::new().destination(us)).matching(from_host);
//!     queue_pair.create_flow(&rule).map(drop) // until the queue pair is dropped
//! }
//! ```
//!
//! | to | |
//! |---|---|
//! | choose packets, and their treatment | [`Rule`], [`RuleFlags`] |
//! | match a header | [`EthernetMatch`], [`Ipv4Match`], [`Ipv6Match`], [`PortMatch`], [`VxlanMatch`], [`GreMatch`], [`MplsMatch`], [`EspMatch`]; all are a [`HeaderMatch`] |
//! | count | [`Counters`], [`Counter`] |
//! | encrypt and decrypt | [`EspAction`], [`EspParameters`], [`EspFlags`] |
//! | end a flow before its queue pair | [`FlowId`] |
//!
//! A flow belongs to the queue pair that created it ([`QueuePair::create_flow`](crate::QueuePair::create_flow)).

mod esp_action;
mod flows;
mod matches;
mod rule;

pub use esp_action::{EspAction, EspFlags, EspParameters};
pub use flows::FlowId;
pub(crate) use flows::Flows;
pub use matches::{
    EspMatch, EthernetMatch, GreMatch, HeaderMatch, Ipv4Match, Ipv6Match, MplsMatch, PortMatch,
    VxlanMatch,
};
pub use rule::{Counter, Counters, Rule, RuleFlags};
