//! The error of a method that consumes an object and fails.

use std::fmt;

use crate::debug::debug;
use crate::error::Error;

/// Why a method that changes an object's state failed ([`error`](Self::error)), with the object for further use
/// ([`object`](Self::object)): the channel that could not be [reset](crate::Channel::reset), or what could not be
/// [connected](crate::PreparedChannel::handshake).
///
/// `?` drops the object and keeps the reason, as [`Error`], [`TransportError`](crate::TransportError), `std::io::Error`
/// or `Box<dyn std::error::Error>`. For other errors, write `.map_err(|failed| failed.error)?`.
///
/// ```no_run
/// # // not on Soft-RoCE alone: needs a peer
/// use std::time::{Duration, Instant};
/// use ibverbs::tcp::ExchangeError;
/// use ibverbs::Channel;
///
/// /// Connects again after a failure, for a minute at most. The channel survives failed attempts.
/// fn reconnect(failed: Channel<'_>) -> Result<Channel<'_>, ExchangeError> {
///     let deadline = Instant::now() + Duration::from_secs(60);
///     let mut prepared = failed.reset()?;
///     loop {
///         let soon = Instant::now() + Duration::from_secs(1);
///         match prepared.connect("server:18515", b"", soon) {
///             Ok((channel, _)) => return Ok(channel),
///             Err(failed) if Instant::now() < deadline => prepared = failed.object,
///             Err(failed) => return Err(failed.error),
///         }
///     }
/// }
/// ```
///
/// It does not implement `std::error::Error`, because the object borrows.
pub struct StateError<T, E = Error> {
    /// The reason.
    pub error: E,
    /// The object, as before the call unless the method says otherwise.
    pub object: T,
}

impl<T, E> StateError<T, E> {
    /// The error of a method that gives back what it consumed.
    pub fn new(object: T, error: E) -> Self {
        Self { error, object }
    }
}

debug! { impl[T, E: fmt::Debug] StateError<T, E>, self, error: self.error, .. }

impl<T, E: fmt::Display> fmt::Display for StateError<T, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl<T> From<StateError<T>> for Error {
    /// Drops the object.
    fn from(failed: StateError<T>) -> Self {
        failed.error
    }
}

impl<T, E: Into<Self>> From<StateError<T, E>> for std::io::Error {
    /// Drops the object.
    fn from(failed: StateError<T, E>) -> Self {
        failed.error.into()
    }
}

impl<T, E: std::error::Error + 'static> From<StateError<T, E>> for Box<dyn std::error::Error> {
    /// Drops the object.
    fn from(failed: StateError<T, E>) -> Self {
        failed.error.into()
    }
}

impl<T, E> From<StateError<T, E>> for Box<dyn std::error::Error + Send + Sync>
where
    E: std::error::Error + Send + Sync + 'static,
{
    /// Drops the object.
    fn from(failed: StateError<T, E>) -> Self {
        failed.error.into()
    }
}
