//! Feature `tracing`: events outside the data path. Without the feature these functions are empty.
//!
//! All events have the target `ibverbs`. This module emits them where something was set up, has changed
//! or has failed, never where a request is posted or a completion is found.

#[cfg(feature = "tracing")]
mod events {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use crate::completion::{WorkError, WorkErrorClass};
    use crate::device::AsyncEvent;
    use crate::error::Error;
    use crate::queue_pair::QueuePairState;

    /// Runs the program's subscriber and catches its panics: a panic must not prevent the code after it
    /// from stopping a device that still uses a buffer.
    fn emit(event: impl FnOnce()) {
        let _ = catch_unwind(AssertUnwindSafe(event));
    }

    #[cold]
    pub(crate) fn verb_failed(error: &Error) {
        emit(|| {
            tracing::warn!(target: "ibverbs", verb = error.verb(), errno = error.raw_os_error(), "{error}");
        });
    }

    #[cold]
    pub(crate) fn object_leaked(error: &Error) {
        emit(|| {
            tracing::error!(target: "ibverbs", verb = error.verb(), errno = error.raw_os_error(),
                "an object could not be destroyed and is leaked: {error}");
        });
    }

    #[cold]
    pub(crate) fn state_changed(queue_pair: u32, from: QueuePairState, to: QueuePairState) {
        emit(|| tracing::debug!(target: "ibverbs", queue_pair, ?from, ?to, "state changed"));
    }

    #[cold]
    pub(crate) fn channel_connected(queue_pair: u32, remote: u32) {
        emit(|| tracing::info!(target: "ibverbs", queue_pair, remote, "channel connected"));
    }

    #[cold]
    pub(crate) fn channel_reset(queue_pair: u32) {
        emit(|| tracing::info!(target: "ibverbs", queue_pair, "channel reset"));
    }

    #[cold]
    pub(crate) fn channel_stopped(queue_pair: u32, outstanding: u32, complete: bool) {
        emit(|| {
            tracing::warn!(target: "ibverbs", queue_pair, outstanding, complete, "channel stopped");
        });
    }

    #[cold]
    pub(crate) fn work_failed(error: &WorkError) {
        emit(|| match error.class() {
            WorkErrorClass::Flushed => {
                tracing::debug!(target: "ibverbs", "operation flushed");
            }
            _ => {
                tracing::warn!(target: "ibverbs", status = ?error.status(), "operation failed: {error}")
            }
        });
    }

    #[cold]
    pub(crate) fn async_event(event: &AsyncEvent) {
        emit(
            || tracing::info!(target: "ibverbs", kind = ?event.kind(), subject = ?event.subject(), "event of the device"),
        );
    }
}

#[cfg(feature = "tracing")]
pub(crate) use events::*;

#[cfg(not(feature = "tracing"))]
mod nothing {
    use crate::completion::WorkError;
    use crate::device::AsyncEvent;
    use crate::error::Error;
    use crate::queue_pair::QueuePairState;

    #[inline(always)]
    pub(crate) fn verb_failed(_: &Error) {}
    #[inline(always)]
    pub(crate) fn object_leaked(_: &Error) {}
    #[inline(always)]
    pub(crate) fn state_changed(_: u32, _: QueuePairState, _: QueuePairState) {}
    #[inline(always)]
    pub(crate) fn channel_connected(_: u32, _: u32) {}
    #[inline(always)]
    pub(crate) fn channel_reset(_: u32) {}
    #[inline(always)]
    pub(crate) fn channel_stopped(_: u32, _: u32, _: bool) {}
    #[inline(always)]
    pub(crate) fn work_failed(_: &WorkError) {}
    #[inline(always)]
    pub(crate) fn async_event(_: &AsyncEvent) {}
}

#[cfg(not(feature = "tracing"))]
pub(crate) use nothing::*;
