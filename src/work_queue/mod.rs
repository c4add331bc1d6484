//! Work queues: receive queues that belong to no queue pair, and queue pairs that spread packets over them.
//!
//! A [`WorkQueue`] takes receives and completes them on its own completion queue. An [`IndirectionTable`]
//! lists work queues. A [`ReceiveScalingQueuePair`] has a table instead of a receive queue: the hash of a
//! packet's headers ([`ReceiveHash`]) chooses the work queue, so that all packets of one connection go to
//! the same one. Flows ([`FlowRule`](crate::flow::FlowRule)) choose the packets.

mod indirection_table;
mod receive_hash;
mod receive_scaling;
mod state;
#[allow(clippy::module_inception, reason = "one object per file")]
mod work_queue;

pub use indirection_table::IndirectionTable;
pub use receive_hash::{ReceiveHash, ReceiveHashFields};
pub use receive_scaling::ReceiveScalingQueuePair;
pub use state::{WorkQueueFlags, WorkQueueState};
pub use work_queue::WorkQueue;
