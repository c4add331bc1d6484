//! completion

mod completion_channel;
mod extended_completion;
mod extended_poller;
mod queue;
mod queue_builder;
mod waiters;
mod work_completion;

pub use completion_channel::{CompletionChannel, CompletionEvent};
pub use extended_completion::{ExtendedCompletion, ExtendedSuccess, TagMatch};
pub use extended_poller::{CompletionFields, ExtendedCompletions, ExtendedPoller};
pub use queue::CompletionQueue;
pub use queue_builder::CompletionQueueBuilder;
pub use work_completion::{
    WorkCompletion, WorkError, WorkErrorClass, WorkOpcode, WorkResult, WorkStatus, WorkSuccess,
};
