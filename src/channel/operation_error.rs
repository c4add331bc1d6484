//! The result of an operation that owns its buffer, and a request that was not posted.

use super::error::TransportError;
use crate::completion::WorkSuccess;
use crate::debug::debug;
use std::fmt;

/// Why an operation that owns its buffer failed, with its buffer: one of an
/// [`AsyncChannel`](crate::AsyncChannel) or a [`Loop`](crate::Loop).
pub struct OperationError<B> {
    /// The reason. That of an operation that was posted and has ended is [`Work`](TransportError::Work); or
    /// [`Stopped`](TransportError::Stopped) or [`Closed`](TransportError::Closed) if the channel was stopped, shut
    /// down or dropped, or its reactor was.
    pub error: TransportError,
    /// The buffer, if the operation has ended, or was not posted. After a failure its contents are undefined where
    /// the operation writes it. `None` if the device may still use it: only the wait has failed; or the queue pair
    /// could be neither reset nor destroyed; or a post has failed that may have been queued.
    pub buffer: Option<B>,
}

/// The result of an operation that owns its buffer: the buffer and the completion.
pub type OwnedResult<B, T = (B, WorkSuccess)> = Result<T, OperationError<B>>;

debug! { impl[B] OperationError<B>, self, error: self.error, .. }

impl<B> fmt::Display for OperationError<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl<B> std::error::Error for OperationError<B> {}

impl<B> From<TransportError> for OperationError<B> {
    /// Without a buffer.
    fn from(error: TransportError) -> Self {
        Self { error, buffer: None }
    }
}

impl<B> From<OperationError<B>> for std::io::Error {
    /// Drops the buffer.
    fn from(error: OperationError<B>) -> Self {
        error.error.into()
    }
}

impl<B> From<OperationError<B>> for TransportError {
    /// Drops the buffer.
    fn from(error: OperationError<B>) -> Self {
        error.error
    }
}

/// A request that was not posted, and why.
#[expect(missing_debug_implementations, reason = "no program can name it")]
pub struct Refused<R> {
    pub(crate) error: TransportError,
    /// `None` if the device may have it.
    pub(crate) request: Option<R>,
    /// Of a window: which of its requests is wrong, or has failed.
    pub(crate) index: Option<usize>,
}

impl<R> Refused<R> {
    pub(crate) fn new(error: TransportError, request: Option<R>) -> Self {
        Self { error, request, index: None }
    }
}
