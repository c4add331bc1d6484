//! Work queues: receive queues that belong to no queue pair, and queue pairs that spread packets over them.
//!
//! [`ReceiveScalingQueuePair`] has an example.
//!
//! | | |
//! |---|---|
//! | [`WorkQueue`], [`State`], [`Flags`] | takes receives, and completes them on a completion queue of its own |
//! | [`IndirectionTable`] | lists work queues |
//! | [`ReceiveScalingQueuePair`] | has a table instead of a receive queue |
//! | [`ReceiveHash`], [`ReceiveHashFields`] | hashes a packet's headers to choose the work queue, one for all packets of a connection |
//!
//! Flows ([`flow::Rule`](crate::flow::Rule)) choose the packets.

mod receive_scaling;
#[allow(clippy::module_inception, reason = "one object per file")]
mod work_queue;

pub use receive_scaling::{ReceiveHash, ReceiveHashFields, ReceiveScalingQueuePair};
pub use work_queue::{Flags, IndirectionTable, State, WorkQueue};
