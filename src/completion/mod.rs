//! Completion queues: where the device reports which requests are finished, and how a thread waits.
//!
//! A [`CompletionQueue`] is polled for [`WorkCompletion`]s, or, if it was built with the extended
//! interface, through an [`ExtendedPoller`], which reads only the requested fields. A thread that finds
//! nothing to poll sleeps on a [`CompletionChannel`], or on the channel of the queue itself (`waiters`
//! shares it among threads, so that no wake-up is lost).

mod completion_channel;
#[cfg(rdma_core_65)]
mod completion_counter;
#[cfg(all(test, ibverbs_loom))]
mod every_order;
mod extended;
mod extended_completion;
mod extended_poller;
mod queue;
mod queue_builder;
mod queue_modify;
mod queue_wait;
mod received_datagram;
mod waiters;
mod waker;
mod work_completion;

pub use completion_channel::{CompletionChannel, CompletionEvent};
#[cfg(rdma_core_65)]
pub use completion_counter::{
    CompletionCounter, CompletionCounterCapabilities, CompletionCounterUnit, CountedOperations,
};
pub use extended::CompletionFields;
pub use extended_completion::{ExtendedCompletion, ExtendedSuccess, TagMatch};
pub use extended_poller::{ExtendedCompletions, ExtendedPoller};
pub use queue::CompletionQueue;
pub use queue_builder::CompletionQueueBuilder;
pub use received_datagram::ReceivedDatagram;
pub(crate) use waiters::Waiters;
#[cfg(feature = "channel")]
pub(crate) use work_completion::message_len;
pub use work_completion::{
    WorkCompletion, WorkError, WorkErrorClass, WorkOpcode, WorkResult, WorkStatus, WorkSuccess,
};
