//! Ending the waits of a channel from another thread.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::Channel;
use crate::completion::Waiters;
use crate::debug::debug;
use crate::error::Result;

/// What a channel and its cancel handles share.
pub(super) struct Cancel {
    cancelled: AtomicBool,
    /// The threads that sleep on the channel's completion queue, if the channel sleeps at all.
    waiters: Option<Arc<Waiters>>,
}

impl Cancel {
    /// Whether the channel was cancelled and no wait has reported it yet.
    pub(super) fn is_pending(&self) -> bool {
        self.cancelled.load(Ordering::Acquire)
    }

    /// As `is_pending`, for the wait that then returns `Cancelled`.
    pub(super) fn take(&self) -> bool {
        self.is_pending() && self.cancelled.swap(false, Ordering::AcqRel)
    }
}

/// Ends a wait of a [`Channel`] from another thread: see [`Channel::cancel_handle`].
///
/// A handle may outlive its channel; it then does nothing.
#[derive(Clone)]
pub struct CancelHandle(Arc<Cancel>);

impl CancelHandle {
    /// Ends the wait that the channel is in, or else the next one that finds its operation still in flight.
    /// The wait returns [`Cancelled`](crate::TransportError::Cancelled) soon, also if it sleeps.
    ///
    /// One call ends one wait; several calls before that wait count as one. An operation that ends first
    /// gives its result, and the next wait is cancelled instead: see [`is_pending`](Self::is_pending).
    pub fn cancel(&self) {
        self.0.cancelled.store(true, Ordering::Release);
        if let Some(waiters) = &self.0.waiters {
            waiters.wake_all();
        }
    }

    /// Whether [`cancel`](Self::cancel) was called and no wait has reported it yet.
    pub fn is_pending(&self) -> bool {
        self.0.is_pending()
    }

    /// Takes back a [`cancel`](Self::cancel) that no wait has reported yet. Returns whether there was one.
    pub fn clear(&self) -> bool {
        self.0.take()
    }
}

debug! { CancelHandle, self, pending: self.is_pending() }

impl Channel<'_> {
    /// A handle with which another thread can end a wait of this channel. All handles of a channel are the
    /// same; they stay valid after a [`reset`](Self::reset).
    ///
    /// A cancelled wait returns [`Cancelled`](crate::TransportError::Cancelled), and does what it does when its deadline
    /// passes: a wait for [credit](Self::wait_for_credit) leaves everything in flight, and can be called again. All others
    /// (blocking operations, scopes, unpolled operations) lend memory to the device that must come back, so they stop the
    /// channel. (A [`Loop`](crate::Loop) owns its buffers: its [`LoopWaker`](crate::channel::LoopWaker) stops nothing.) A
    /// channel without a handle pays nothing: only a wait that has found nothing for a while looks.
    ///
    /// ```no_run
    /// # // not on Soft-RoCE alone: needs a peer
    /// # fn serve(channel: &mut ibverbs::Channel<'_>, region: &mut ibverbs::MemoryRegion<'_, u8>) -> Result<(), Box<dyn std::error::Error>> {
    /// use ibverbs::TransportError;
    ///
    /// let stop = channel.cancel_handle()?;
    /// std::thread::spawn(move || {
    ///     let mut line = String::new();
    ///     let _ = std::io::stdin().read_line(&mut line);
    ///     stop.cancel();
    /// });
    /// match channel.receive(&mut region.slice_mut(..)?) {
    ///     Ok(success) => println!("{} bytes", success.byte_len()),
    ///     Err(TransportError::Cancelled) => println!("the channel is stopped: reset it, or drop it"),
    ///     Err(error) => return Err(error.into()),
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// The first handle of a channel that [sleeps](crate::ChannelBuilder::sleep_after) needs a file:
    ///
    ///  - `EMFILE`, `ENFILE`: the process, or the machine, has too many files open.
    ///  - `ENOMEM`: out of memory.
    pub fn cancel_handle(&mut self) -> Result<CancelHandle> {
        let core = self.core();
        if let Some(cancel) = core.cancel.get() {
            return Ok(CancelHandle(cancel.clone()));
        }
        let waiters = core.sleep.map(|sleep| sleep.wakeable()).transpose()?;
        let cancel = Arc::new(Cancel { cancelled: AtomicBool::new(false), waiters });
        Ok(CancelHandle(core.cancel.get_or_init(|| cancel).clone()))
    }
}
