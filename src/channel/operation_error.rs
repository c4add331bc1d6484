//! Why an operation that owns its buffer failed.

use std::fmt;

use super::error::TransportError;

/// Why an operation of an [`AsyncChannel`](crate::AsyncChannel), or a post to
/// [`SharedReceives`](crate::SharedReceives), failed, with its buffer.
pub struct OperationError<B> {
    /// The reason: one of [those of posting](crate::Scope#errors) or [`Work`](TransportError::Work); or
    /// [`Stopped`](TransportError::Stopped) or [`Closed`](TransportError::Closed) if the channel was shut
    /// down or dropped, or its reactor was.
    pub error: TransportError,
    /// The buffer. After a failure its contents are undefined where the operation writes it. `None` if
    /// the device may still use the buffer: the queue pair could be neither reset nor destroyed, or a failed
    /// post may have queued the receive.
    pub buffer: Option<B>,
}

impl<B> fmt::Debug for OperationError<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OperationError").field("error", &self.error).finish_non_exhaustive()
    }
}

impl<B> fmt::Display for OperationError<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl<B> std::error::Error for OperationError<B> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.error.source()
    }
}

impl<B> From<OperationError<B>> for TransportError {
    /// Drops the buffer.
    fn from(error: OperationError<B>) -> Self {
        error.error
    }
}
