//! Flow steering: which packets a queue pair receives, what is done with them, and how they are counted.
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
//! | say which packets, and what becomes of them | [`Rule`], [`RuleFlags`] |
//! | match a header | [`EthernetMatch`], [`Ipv4Match`], [`Ipv6Match`], [`PortMatch`], [`VxlanMatch`], [`GreMatch`], [`MplsMatch`], [`EspMatch`]; all are a [`HeaderMatch`] |
//! | count them | [`Counters`], [`Counter`] |
//! | encrypt and decrypt them | [`EspAction`], [`EspParameters`], [`EspFlags`] |
//! | end a flow before its queue pair | [`FlowId`] |
//!
//! A flow belongs to the queue pair that it was created on ([`QueuePair::create_flow`](crate::QueuePair::create_flow)).

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
