//! Work queues: receive queues that belong to no queue pair, and queue pairs that spread packets over them.
//!
//! [`ReceiveScalingQueuePair`] has a program.
//!
//! | | |
//! |---|---|
//! | [`WorkQueue`], [`State`], [`Flags`] | takes receives, and completes them on a completion queue of its own |
//! | [`IndirectionTable`] | lists work queues |
//! | [`ReceiveScalingQueuePair`] | has a table instead of a receive queue |
//! | [`ReceiveHash`], [`ReceiveHashFields`] | the hash of a packet's headers, which chooses the work queue: all packets of one connection go to the same one |
//!
//! Flows ([`flow::Rule`](crate::flow::Rule)) choose the packets.

mod receive_scaling;
#[allow(clippy::module_inception, reason = "one object per file")]
mod work_queue;

pub use receive_scaling::{ReceiveHash, ReceiveHashFields, ReceiveScalingQueuePair};
pub use work_queue::{Flags, IndirectionTable, State, WorkQueue};
