//! Feature `tracing`: events outside the data path. Without the feature these functions are empty.
//!
//! All events have the target `ibverbs`. They tell what was set up, has changed or has failed, not what was posted or
//! completed. A subscriber is the program's code: while a [`Hold`] lives, events wait.

use std::fmt;

use crate::base::{Error, QueuePairState};

#[cfg(feature = "tracing")]
mod held {
    use std::cell::{Cell, RefCell};

    use crate::base::panics;

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
    pub(super) fn emit(event: impl FnOnce() + 'static) {
        let mut event = Some(event);
        if HELD.try_with(Cell::get).is_ok_and(|held| held > 0) {
            let boxed = |event| Box::new(event) as Event;
            let _ = QUEUE.try_with(|queue| queue.borrow_mut().extend(event.take().map(boxed)));
        }
        event.into_iter().for_each(run);
    }
}

#[cfg(not(feature = "tracing"))]
mod held {
    #[derive(Debug)]
    pub(crate) struct Hold(());

    impl Hold {
        #[inline(always)]
        pub(crate) fn new() -> Self {
            Self(())
        }
    }
}

pub(crate) use held::Hold;
#[cfg(feature = "tracing")]
use held::emit;

/// The functions; without the feature, they are empty.
#[cfg(feature = "tracing")]
macro_rules! events {
    ($($(#[$meta:meta])* pub(crate) fn $name:ident($($argument:ident: $type:ty),+) $body:block)+) => {$(
        $(#[$meta])*
        #[cold]
        pub(crate) fn $name($($argument: $type),+) $body
    )+};
}

#[cfg(not(feature = "tracing"))]
macro_rules! events {
    ($($(#[$meta:meta])* pub(crate) fn $name:ident($($argument:ident: $type:ty),+) $body:block)+) => {$(
        $(#[$meta])*
        #[inline(always)]
        pub(crate) fn $name($(_: $type),+) {}
    )+};
}

events! {
    pub(crate) fn verb_failed(error: &Error) {
        let error = *error;
        emit(move || {
            tracing::warn!(target: "ibverbs", verb = error.verb(), errno = error.errno(), "{error}");
        });
    }

    pub(crate) fn device_passed_over(name: &str, error: &Error) {
        let (name, error) = (name.to_owned(), *error);
        emit(move || {
            tracing::warn!(target: "ibverbs", device = name, errno = error.errno(), "device passed over: {error}");
        });
    }

    pub(crate) fn object_leaked(error: &Error) {
        let error = *error;
        emit(move || {
            tracing::error!(target: "ibverbs", verb = error.verb(), errno = error.errno(),
                "an object could not be destroyed and is leaked: {error}");
        });
    }

    pub(crate) fn state_changed(queue_pair: u32, from: QueuePairState, to: QueuePairState) {
        emit(move || tracing::debug!(target: "ibverbs", queue_pair, ?from, ?to, "state changed"));
    }

    pub(crate) fn channel_connected(queue_pair: u32, remote: u32) {
        emit(move || tracing::info!(target: "ibverbs", queue_pair, remote, "channel connected"));
    }

    pub(crate) fn channel_reset(queue_pair: u32) {
        emit(move || tracing::info!(target: "ibverbs", queue_pair, "channel reset"));
    }

    pub(crate) fn channel_stopped(queue_pair: u32, outstanding: u32, complete: bool) {
        emit(move || {
            tracing::warn!(target: "ibverbs", queue_pair, outstanding, complete, "channel stopped");
        });
    }

    #[cfg(feature = "async")]
    pub(crate) fn reactor_stands(why: &'static str) {
        emit(move || {
            tracing::warn!(target: "ibverbs", "no task runs the reactor, so no future ends: {why}");
        });
    }

    pub(crate) fn work_failed(
        flushed: bool,
        status: impl fmt::Debug + Copy + 'static,
        error: impl fmt::Display + Copy + 'static
    ) {
        emit(move || {
            if flushed {
                tracing::debug!(target: "ibverbs", "operation flushed");
            } else {
                tracing::warn!(target: "ibverbs", ?status, "operation failed: {error}");
            }
        });
    }

    pub(crate) fn async_event(
        kind: impl fmt::Debug + Copy + 'static,
        subject: impl fmt::Debug + Copy + 'static
    ) {
        emit(move || tracing::info!(target: "ibverbs", ?kind, ?subject, "event of the device"));
    }
}
