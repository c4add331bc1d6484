//! What operations that own their buffers return.

#[cfg(doc)]
use super::error::TransportError;
use super::error::TransportResult;
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
