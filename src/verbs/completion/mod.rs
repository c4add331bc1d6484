//! Completion queues: how the device reports finished requests, and how a thread waits for them.
//!
//! ```
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let rxe0 = ibverbs_software::Device::builder().name("rxe0").build().unwrap();
//! # rxe0.register();
//! use ibverbs::{Rc, WorkCompletion};
//!
//! let context = ibverbs::open_first()?;
//! let domain = context.alloc_pd()?;
//! let mut region = domain.allocate::<u8>(10)?;
//! let queue = context.create_cq(16)?;
//! let prepared = domain.create_qp(&queue, &queue, Rc).build()?;
//! let itself = prepared.endpoint();
//! let mut queue_pair = prepared.handshake(itself)?;
//! // SAFETY: the region is not touched until both completions were polled.
//! unsafe {
//!     queue_pair.post_receive(&mut region, 5.., 1)?;
//!     queue_pair.post_send(&region, ..5, 2)?;
//! }
//! let (mut completions, mut ended) = ([WorkCompletion::default(); 16], 0);
//! while ended < 2 {
//!     for completion in queue.poll(&mut completions)? {
//!         println!("{}: {} bytes", completion.wr_id(), completion.result()?.byte_len());
//!         ended += 1;
//!     }
//! }
//! # Ok(())
//! # }
//! ```
//!
//! | to | |
//! |---|---|
//! | make a queue and poll it | [`CompletionQueue`], [`CompletionQueueBuilder`] |
//! | read what was polled | [`WorkCompletion`], [`WorkSuccess`], [`WorkError`], [`WorkStatus`], [`WorkErrorClass`], [`WorkOpcode`] |
//! | read only some fields, or more of them | [`ExtendedPoller`], [`ExtendedCompletion`], [`ExtendedSuccess`], [`CompletionFields`], [`TagMatch`] |
//! | sleep until there is one | [`CompletionQueue::wait`], [`CompletionQueue::sleep_until`]; many queues on a [`CompletionChannel`], with [`CompletionEvent`]s |
//! | count instead | `CompletionCounter` (rdma-core 65) |

mod completion_channel;
#[cfg(rdma_core_65)]
mod completion_counter;
#[cfg(all(test, ibverbs_loom))]
mod every_order;
mod extended_completion;
mod extended_poller;
mod queue;
mod queue_builder;
mod waiters;
mod waker;
mod work_completion;

pub use completion_channel::{CompletionChannel, CompletionEvent};
#[cfg(rdma_core_65)]
pub use completion_counter::{
    CompletionCounter, CompletionCounterCapabilities, CompletionCounterUnit, CountedOperations,
};
pub use extended_completion::{
    CompletionFields, ExtendedCompletion, ExtendedSuccess, ReceivedDatagram, TagMatch,
};
pub use extended_poller::{ExtendedCompletions, ExtendedPoller};
pub use queue::CompletionQueue;
pub(crate) use queue::QueueRef;
pub use queue_builder::CompletionQueueBuilder;
pub(crate) use waiters::Waiters;
#[cfg(feature = "channel")]
pub(crate) use work_completion::message_len;
pub use work_completion::{
    WorkCompletion, WorkError, WorkErrorClass, WorkOpcode, WorkResult, WorkStatus, WorkSuccess,
};
