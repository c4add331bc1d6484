//! What operations that own their buffers return.

use std::fmt;

use super::error::{TransportError, TransportResult};
use super::owned_buffer::AnyBuffer;
use crate::completion::WorkSuccess;

/// An owned operation that has ended and was known by a token: see [`Channel::poll_token`](crate::Channel::poll_token).
#[derive(Debug)]
pub struct TokenResult {
    /// What [`OwnedWork::into_token`](crate::OwnedWork::into_token) was given.
    pub token: u64,
    /// The buffer.
    pub buffer: AnyBuffer,
    /// The result of the operation: an error is [`Work`](TransportError::Work),
    /// [`Stopped`](TransportError::Stopped) or [`Closed`](TransportError::Closed).
    pub result: TransportResult<WorkSuccess>,
}

/// Why an owned operation was not posted. It holds the operation's buffer.
pub struct PostError<B> {
    /// The reason: [those of posting](crate::Scope#errors).
    pub error: TransportError,
    /// The buffer.
    pub buffer: B,
}

impl<B> fmt::Debug for PostError<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostError").field("error", &self.error).finish_non_exhaustive()
    }
}

impl<B> fmt::Display for PostError<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl<B> std::error::Error for PostError<B> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.error.source()
    }
}

impl<B> From<PostError<B>> for TransportError {
    /// Drops the buffer.
    fn from(error: PostError<B>) -> Self {
        error.error
    }
}
