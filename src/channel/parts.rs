//! The private part of channels that loops, futures, pools and the connection manager use. They see nothing else, beside the
//! public types.

pub(crate) use super::builder::check_context;
pub(crate) use super::core::Core;
pub(crate) use super::credits::NO_CREDIT;
pub(crate) use super::datagrams::{DatagramEnd, DatagramPort, EndKind, explain, refuse_send};
pub(crate) use super::directed::Directed;
pub(crate) use super::dispatch::{BATCH, PollCq, Polled, count, poll_cq_of};
pub(crate) use super::error::Refused;
pub(crate) use super::keep_alive::{check_reliable, nowhere};
pub(crate) use super::link::Link;
pub(crate) use super::operation::{Limits, Operation, OwnTemplates, Queue, Target, Templates};
pub(crate) use super::peer_sign::PeerSign;
#[cfg(feature = "async")]
pub(crate) use super::peer_sign::of_socket;
pub(crate) use super::posting::{KeptSend, list_of};
pub(crate) use super::slot::{NO_SLOT, ONE};
pub(crate) use super::stop::POLL_FAILURES;
pub(crate) use super::wait::DEVICE_CHECK_PERIOD;
