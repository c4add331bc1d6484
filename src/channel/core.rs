//! What a channel posts with and polls with.
//!
//! A [`Core`] is the part of a channel that the data path uses: the raw queue pair and completion
//! queue, the prepared requests, and the table of what is in flight. Its fields are cells, because a
//! scope and its handles share it by reference, and each of them posts or polls. One thread at a time
//! uses it.
//!
//! # Which operation a completion belongs to
//!
//! A work request is numbered `epoch << 32 | index`: see [`epoch`](super::epoch). A completion belongs
//! to an operation if it names this queue pair, the current epoch, and a slot that is in flight. A
//! completion with an earlier epoch is dropped. Any other is an
//! [`UnknownCompletion`](TransportError::UnknownCompletion).

use std::cell::{Cell, OnceCell, UnsafeCell};
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use super::batch::{Batch, PollCq};
use super::cancel::Cancel;
use super::credits::{COUNTING, CreditWords, Credits};
use super::epoch::new_epoch;
use super::error::TransportError;
use super::in_flight::{BLOCKING, InFlight, Queue};
use super::operation::{Limits, Prepared};
use super::routed_poll::{Route, poll_routed, poll_routed_receives};
use super::router::{Inbox, Router};
use super::shared_receives::{Member, Receives};
use super::slot::Slot;
use super::wait::Sleep;
use crate::device::Clock;
use crate::ffi;

/// See the [module](self).
pub(super) struct Core {
    /// Live until `destroyed`: the owner of the core owns it too.
    pub(super) queue_pair: *mut ffi::ibv_qp,
    /// The number of the queue pair. It stays readable after the queue pair was destroyed.
    pub(super) number: u32,
    /// The upper half of all current request numbers.
    pub(super) epoch: Cell<u64>,
    /// Completions with an epoch between this one and the current one are from earlier connections.
    pub(super) first_epoch: u32,
    /// The epoch that the core was made in. A `PendingWork` carries it to name its channel.
    pub(super) identity: u32,
    /// The epoch of the latest connection, in the upper half.
    connection: Cell<u64>,
    /// The requests, prepared. Accessed through pointers only, never by reference.
    pub(super) prepared: UnsafeCell<Prepared>,
    /// The function that polls, and its first argument: the provider's function and the completion queue,
    /// or `poll_routed` and `route`.
    pub(super) poll_cq: Cell<PollCq>,
    pub(super) polled: Cell<*mut ffi::ibv_cq>,
    /// The request number of blocking operations.
    pub(super) blocking_id: Cell<u64>,
    /// Whether blocking operations can skip all checks before they post: the channel is open, nothing
    /// else is in flight, and the batch is empty.
    pub(super) fast_path: Cell<bool>,
    pub(super) batch: Batch,
    pub(super) table: InFlight,
    /// Whether a blocking operation is in flight while `stop` polls.
    pub(super) blocking: Cell<bool>,
    pub(super) limits: Limits,
    /// The router of a shared completion queue, and this channel's inbox.
    pub(super) router: Option<(Arc<Router>, Inbox)>,
    /// Made of `router`. `polled` points here.
    route: Option<Route>,
    /// Whether the router was told that there are results.
    pub(super) has_told_results: Cell<bool>,
    /// The shared receive queue that feeds the channel, if there is one, and the channel's messages.
    pub(super) receives: Option<(Arc<Receives>, Member)>,
    /// The flow control, if the channel has it. Boxed, since few channels have it.
    pub(super) credits: Option<Box<Credits>>,
    /// What to sleep on. `None`: waits spin.
    pub(super) sleep: Option<Sleep>,
    /// What ends a wait from another thread. Empty until the first handle is made.
    pub(super) cancel: OnceCell<Arc<Cancel>>,
    /// Whether the destroy verb was called, by `stop` or by the link: nothing uses the queue pair any
    /// more.
    pub(super) destroyed: Cell<bool>,
    /// Whether the last check of the device found the queue pair in ERR.
    pub(super) found_in_error: Cell<bool>,
    pub(super) settle_timeout: Duration,
    pub(super) unreported: Unreported,
}

/// What the end of a scope has to report: results that no handle has seen.
#[derive(Debug, Default)]
pub(super) struct Unreported {
    /// Whether an operation has ended whose handle was dropped before its result was seen.
    pub(super) unpolled: Cell<bool>,
    /// The first failure among those.
    pub(super) error: Cell<Option<TransportError>>,
}

// SAFETY: any thread may use the queue pair and the completion queue (libibverbs locks), and the
// pointers stay valid on every thread, as the core's owner owns what they point to. All other fields
// are owned, and `Send`.
unsafe impl Send for Core {}
// SAFETY: only two things change a core: its link's owner, which holds it exclusively; and a scope with
// its handles, which borrow it exclusively from that owner and are tied to one thread by `OneThread`.
// A shared reference to the owner only reads cells. A handle of an operation that owns its buffer shares
// the core with any thread; without its owner, it touches the atomics of `table.owned` and of its slot only.
unsafe impl Sync for Core {}

/// Makes a type neither `Send` nor `Sync`.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct OneThread(PhantomData<*const ()>);

/// The settings of a core.
#[derive(Clone, Copy, Debug)]
pub(super) struct CoreSettings {
    pub(super) limits: Limits,
    pub(super) settle_timeout: Duration,
    pub(super) sleep: Option<Sleep>,
    /// For a channel with flow control.
    pub(super) credit_words: Option<CreditWords>,
}

impl Core {
    /// The core of a queue pair that is not connected yet. It contains pointers to itself, so it must not
    /// move. It is in an `Arc`, because a `Box` asserts that it is the only pointer to its content.
    /// `earlier` is the core that this one replaces when the channel is reset, so that tokens and
    /// completions of the earlier core are recognised.
    ///
    /// # Safety
    ///
    /// The queue pair is live, and only [`destroy`](Self::destroy) destroys it while the core is used.
    /// Only this core posts to it, and only this core (with its router) polls its completions. The
    /// queue in `settings.sleep` is its completion queue. The memory of `settings.credit_words` stays
    /// registered while the core is used, and until the queue pair was reset or destroyed; nobody else
    /// accesses it.
    pub(super) unsafe fn new(
        queue_pair: *mut ffi::ibv_qp,
        settings: &CoreSettings,
        table: InFlight,
        router: Option<(Arc<Router>, Inbox)>,
        receives: Option<(Arc<Receives>, Member)>,
        earlier: Option<&Self>,
    ) -> Arc<Self> {
        let epoch = new_epoch();
        // SAFETY: the caller vouches for the queue pair, and with it for its parents.
        let (completion_queue, number, poll_cq, prepared, clock) = unsafe {
            let ffi::ibv_qp { send_cq, qp_num, context, .. } = *queue_pair;
            let poll_cq = (*(*send_cq).context).ops.poll_cq;
            (send_cq, qp_num, poll_cq, Prepared::new(queue_pair), Clock::of(context))
        };
        let core = Arc::new(Self {
            queue_pair,
            number,
            epoch: Cell::new(u64::from(epoch) << 32),
            first_epoch: match (&router, earlier) {
                (Some((router, _)), _) => router.first_epoch(),
                (None, Some(earlier)) => earlier.first_epoch,
                (None, None) => epoch,
            },
            identity: earlier.map_or(epoch, |earlier| earlier.identity),
            connection: Cell::new(0),
            prepared: UnsafeCell::new(prepared),
            // libibverbs sets every operation of a context before it hands the context out.
            poll_cq: Cell::new(poll_cq.expect("libibverbs sets it")),
            polled: Cell::new(completion_queue),
            blocking_id: Cell::new(0),
            fast_path: Cell::new(false),
            batch: Batch::new(),
            table,
            blocking: Cell::new(false),
            limits: settings.limits,
            route: router.as_ref().map(Route::new),
            router,
            has_told_results: Cell::new(false),
            receives,
            credits: settings.credit_words.map(|words| Box::new(Credits::new(words, clock))),
            sleep: settings.sleep,
            cancel: earlier.map_or_else(OnceCell::new, |earlier| earlier.cancel.clone()),
            destroyed: Cell::new(false),
            found_in_error: Cell::new(false),
            settle_timeout: settings.settle_timeout,
            unreported: Unreported::default(),
        });
        if let Some(route) = &core.route {
            core.polled.set(std::ptr::from_ref(route).cast_mut().cast());
            let fed = core.receives.is_some();
            core.poll_cq.set(if fed { poll_routed_receives } else { poll_routed });
        }
        // SAFETY: the core does not move any more; `post_raw` gets its pointer from the same cell.
        unsafe { Prepared::set_piece_pointers(core.prepared.get()) };
        if core.credits.is_some() {
            let this = Arc::as_ptr(&core).cast_mut().cast();
            // SAFETY: nothing else accesses the requests yet. The functions get the core that they expect.
            unsafe { Prepared::replace_functions(core.prepared.get(), this, COUNTING) };
        }
        core
    }

    /// The settings that the core was made with.
    pub(super) fn settings(&self) -> CoreSettings {
        let Self { limits, settle_timeout, sleep, .. } = *self;
        let credit_words = self.credits.as_deref().map(Credits::words);
        CoreSettings { limits, settle_timeout, sleep, credit_words }
    }

    /// Whether the transport is a reliable connection.
    pub(super) fn is_reliable(&self) -> bool {
        self.limits.reliable
    }

    #[inline]
    pub(super) fn queue_pair(&self) -> *mut ffi::ibv_qp {
        self.queue_pair
    }

    /// Starts a new epoch: completions of requests that were posted before are dropped from now on.
    pub(super) fn start_epoch(&self) {
        self.epoch.set(u64::from(new_epoch()) << 32);
    }

    /// Lets receives be posted. To be called when the queue pair is in INIT and nothing is in flight.
    pub(super) fn open_receives(&self) {
        self.start_epoch();
        self.connection.set(self.epoch.get());
        self.blocking_id.set(self.epoch.get() | u64::from(BLOCKING));
        self.drop_owned_buffers();
        self.has_told_results.set(false);
        if let Some(credits) = &self.credits {
            credits.open();
        }
        self.table.open_receives(self.epoch.get());
        self.update_fast_path();
    }

    /// Lets everything be posted. To be called when the queue pair is connected, and nothing is in flight
    /// but receives that were posted after `open_receives`.
    pub(super) fn open(&self) {
        if !self.table.is_open_for_receives() {
            self.open_receives();
        }
        if self.receives.is_none() && self.credits.is_none() {
            self.table.open_sends();
        } else {
            // A blocking receive must not be posted, or a send needs credit, so there is no fast path.
            self.table.open_sends_only();
        }
        self.update_fast_path();
    }

    /// As [`open`](Self::open), unless a failure has stopped the channel since its receives were opened.
    #[cfg(feature = "rdmacm")]
    pub(super) fn open_unless_stopped(&self) {
        if self.table.is_open_for_receives() {
            self.open();
        }
    }

    /// Prevents further posts.
    pub(super) fn close(&self) {
        self.table.close();
        self.update_fast_path();
    }

    /// Computes `fast_path`. To be called after every change of what it depends on.
    #[inline]
    pub(super) fn update_fast_path(&self) {
        let idle = self.table.is_open_for_all() && !self.table.any_in_use();
        self.fast_path.set(idle && self.batch.is_empty());
    }

    /// The reason why a queue has no free slot.
    #[cold]
    pub(super) fn refusal(&self, queue: Queue) -> TransportError {
        if self.destroyed.get() {
            TransportError::Closed
        } else if queue == Queue::Receive && self.receives.is_some() {
            TransportError::ReceivesAreShared
        } else if self.table.is_closed() {
            TransportError::Stopped
        } else if queue == Queue::Send && self.table.is_open_for_receives() {
            TransportError::NotConnected
        } else {
            TransportError::QueueFull
        }
    }

    /// Frees a slot and computes `fast_path`. Within a scope `table.release` is enough: blocking
    /// operations cannot run before the scope has ended.
    #[inline]
    pub(super) fn release(&self, slot: &Slot) {
        self.table.release(slot);
        self.update_fast_path();
    }

    /// Whether the device still has a blocking operation.
    pub(super) fn is_blocking(&self) -> bool {
        self.blocking.get()
    }

    /// Ends the blocking operation without a completion.
    pub(super) fn clear_blocking(&self) {
        self.blocking.set(false);
    }

    /// Why no message can come any more from a shared receive queue.
    pub(super) fn why_no_message_comes(&self) -> Option<TransportError> {
        if self.destroyed.get() {
            return Some(TransportError::Closed);
        }
        self.table.is_closed().then_some(TransportError::Stopped)
    }

    /// Whether `wr_id` is of the latest connection.
    pub(super) fn is_of_connection(&self, wr_id: u64) -> bool {
        wr_id & !u64::from(u32::MAX) == self.connection.get()
    }
}

impl Drop for Core {
    /// Buffers that the device may still use are leaked.
    fn drop(&mut self) {
        self.drop_owned_buffers();
    }
}

impl fmt::Debug for Core {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Core")
            .field("number", &self.number)
            .field("epoch", &(self.epoch.get() >> 32))
            .field("depth", &self.table.slots().len())
            .field("in_use", &self.table.in_use())
            .field("open", &self.table.is_open())
            .field("destroyed", &self.destroyed.get())
            .finish_non_exhaustive()
    }
}
