//! A request that was not posted.

use super::error::TransportError;

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
