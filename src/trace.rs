//! Feature `tracing`: events outside the data path. Without the feature these functions are empty.
//!
//! All events have the target `ibverbs`. They tell what was set up, has changed or has failed, not what was posted or
//! completed. A subscriber is the program's code: while a [`Hold`] lives, events wait.

#[cfg(feature = "tracing")]
mod events {
    use std::cell::{Cell, RefCell};
    use std::fmt;

    use crate::error::Error;
    use crate::panics;
    use crate::queue_pair_state::QueuePairState;

    type Event = Box<dyn FnOnce()>;

    thread_local! {
        /// Locks that this thread holds, and that the subscriber may need.
        static HELD: Cell<usize> = const { Cell::new(0) };
        static QUEUE: RefCell<Vec<Event>> = const { RefCell::new(Vec::new()) };
    }

    /// Queues this thread's events while it holds a lock that the program's subscriber may need. Drop it after the
    /// lock.
    #[derive(Debug)]
    pub(crate) struct Hold(());

    impl Hold {
        pub(crate) fn new() -> Self {
            // A thread that is ending has no queue, and emits events at once.
            let _ = HELD.try_with(|held| held.set(held.get() + 1));
            Self(())
        }
    }

    impl Drop for Hold {
        fn drop(&mut self) {
            let held = HELD.try_with(|held| {
                held.set(held.get() - 1);
                held.get()
            });
            if held == Ok(0) {
                let next = || QUEUE.try_with(|queue| queue.take()).unwrap_or_default();
                next().into_iter().for_each(run);
            }
        }
    }

    /// Catches panics: the code after it may have to stop a device that still uses a buffer.
    fn run(event: impl FnOnce()) {
        let _ = panics::catch(event);
    }

    /// Only queueing allocates.
    fn emit(event: impl FnOnce() + 'static) {
        let mut event = Some(event);
        if HELD.try_with(Cell::get).is_ok_and(|held| held > 0) {
            let boxed = |event| Box::new(event) as Event;
            let _ = QUEUE.try_with(|queue| queue.borrow_mut().extend(event.take().map(boxed)));
        }
        event.into_iter().for_each(run);
    }

    #[cold]
    pub(crate) fn verb_failed(error: &Error) {
        let error = *error;
        emit(move || {
            tracing::warn!(target: "ibverbs", verb = error.verb(), errno = error.errno(), "{error}");
        });
    }

    #[cold]
    pub(crate) fn object_leaked(error: &Error) {
        let error = *error;
        emit(move || {
            tracing::error!(target: "ibverbs", verb = error.verb(), errno = error.errno(),
                "an object could not be destroyed and is leaked: {error}");
        });
    }

    #[cold]
    pub(crate) fn state_changed(queue_pair: u32, from: QueuePairState, to: QueuePairState) {
        emit(move || tracing::debug!(target: "ibverbs", queue_pair, ?from, ?to, "state changed"));
    }

    #[cold]
    pub(crate) fn channel_connected(queue_pair: u32, remote: u32) {
        emit(move || tracing::info!(target: "ibverbs", queue_pair, remote, "channel connected"));
    }

    #[cold]
    pub(crate) fn channel_reset(queue_pair: u32) {
        emit(move || tracing::info!(target: "ibverbs", queue_pair, "channel reset"));
    }

    #[cold]
    pub(crate) fn channel_stopped(queue_pair: u32, outstanding: u32, complete: bool) {
        emit(move || {
            tracing::warn!(target: "ibverbs", queue_pair, outstanding, complete, "channel stopped");
        });
    }

    #[cfg(feature = "async")]
    #[cold]
    pub(crate) fn reactor_stands(why: &'static str) {
        emit(move || {
            tracing::warn!(target: "ibverbs", "no task runs the reactor, so no future ends: {why}");
        });
    }

    #[cold]
    pub(crate) fn work_failed(
        flushed: bool,
        status: impl fmt::Debug + Copy + 'static,
        error: impl fmt::Display + Copy + 'static,
    ) {
        emit(move || {
            if flushed {
                tracing::debug!(target: "ibverbs", "operation flushed");
            } else {
                tracing::warn!(target: "ibverbs", ?status, "operation failed: {error}");
            }
        });
    }

    #[cold]
    pub(crate) fn async_event(
        kind: impl fmt::Debug + Copy + 'static,
        subject: impl fmt::Debug + Copy + 'static,
    ) {
        emit(move || tracing::info!(target: "ibverbs", ?kind, ?subject, "event of the device"));
    }
}

#[cfg(feature = "tracing")]
pub(crate) use events::*;

#[cfg(not(feature = "tracing"))]
mod nothing {
    use crate::error::Error;
    use crate::queue_pair_state::QueuePairState;

    #[derive(Debug)]
    pub(crate) struct Hold(());

    impl Hold {
        #[inline(always)]
        pub(crate) fn new() -> Self {
            Self(())
        }
    }

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
    #[cfg(feature = "async")]
    #[inline(always)]
    pub(crate) fn reactor_stands(_: &'static str) {}
    #[inline(always)]
    pub(crate) fn work_failed<S, E>(_: bool, _: S, _: E) {}
    #[inline(always)]
    pub(crate) fn async_event<K, S>(_: K, _: S) {}
}

#[cfg(not(feature = "tracing"))]
pub(crate) use nothing::*;
