//! The part of a channel that the data path uses.
//!
//! The fields of a [`Core`] are cells: a scope and its handles share it by reference, and each posts or polls. One
//! thread at a time uses it.

use std::cell::{Cell, OnceCell, UnsafeCell};
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::credits::{CreditWords, Credits};
use super::dispatch::CqPoller;
use super::error::{TransportError, TransportResult};
use super::in_flight::InFlight;
use super::operation::{Limits, Queue, Target, Templates};
use super::slot::{Slot, State};
use super::wait::{Cancel, Sleep};
use crate::base::{debug, ffi};
use crate::verbs::completion::WorkSuccess;
use crate::verbs::device::Clock;

/// See the [module](self).
pub(crate) struct Core {
    pub(crate) queue_pair: *mut ffi::ibv_qp,
    /// Still valid after the queue pair was destroyed.
    pub(crate) number: u32,
    /// Unique in the process. A reset keeps it.
    pub(super) identity: u64,
    pub(crate) target: Cell<Target>,
    /// Accessed through pointers only, never by reference.
    pub(super) prepared: UnsafeCell<Templates>,
    pub(super) blocking_id: Cell<u64>,
    /// Blocking operations need no checks: the channel is open, nothing is in flight, nothing polled is left.
    pub(super) fast_path: Cell<bool>,
    pub(super) poller: CqPoller,
    pub(crate) table: InFlight,
    pub(crate) settings: CoreSettings,
    /// Boxed, since few channels have flow control.
    pub(crate) credits: Option<Box<Credits>>,
    pub(super) cancel: OnceCell<Arc<Cancel>>,
    /// The destroy verb was called. Nothing uses the queue pair any more.
    pub(crate) destroyed: Cell<bool>,
    /// At the last `check_device`.
    pub(super) found_in_error: Cell<bool>,
    /// By `check_device_if_due`.
    pub(super) checked_at: Cell<Option<Instant>>,
    pub(crate) clock: Clock,
    pub(crate) unreported: Unreported,
}

/// For the end of a scope to report: no handle has seen it.
#[derive(Debug, Default)]
pub(crate) struct Unreported {
    /// An operation has ended whose handle was dropped before.
    pub(super) unpolled: Cell<bool>,
    /// The first failure among those.
    pub(crate) error: Cell<Option<TransportError>>,
}

// SAFETY: libibverbs locks the queue pair and the completion queue, so any thread may use them. The link owns the
// core, and keeps what its pointers point to for as long as anything uses them. All other fields are `Send`.
unsafe impl Send for Core {}
// SAFETY: two things change a core: its link's owner, who holds it exclusively; and a scope with its handles, which
// borrow it exclusively from that owner and stay on one thread (`OneThread`). A shared reference to the owner only
// reads cells.
//
// In a loop, the table refers to the core too (`ColdState::core`). Only the loop's owner, or the holder of its lock, uses
// the table. Another thread may have the link meanwhile. If that thread changes what the table looks at
// (`Loop::close`, `take_out`, and what ends a channel), the table has no reference to the core until the link is
// back. Otherwise (`Loop::borrow_out`) the two never touch the same cell, unless both only read it:
//
//  - the thread with the link changes `checked_at` and `found_in_error`, when it queries the queue pair, and
//    `credits.peer`, while no send is open that would ask the peer; it reads `destroyed`;
//  - the holder of the loop changes `unreported.error`, the other cells of `credits`, and `table.open`, when the
//    connection manager establishes the connection; it reads `destroyed`.
//
// A `LoopSender` has the core too. Until the loop has ended it, under its lock, it reads `settings` and `destroyed`.
unsafe impl Sync for Core {}

static NEXT_IDENTITY: AtomicU64 = AtomicU64::new(0);

/// Makes a type neither `Send` nor `Sync`.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct OneThread(PhantomData<*const ()>);

#[derive(Clone, Copy, Debug)]
pub(crate) struct CoreSettings {
    pub(crate) limits: Limits,
    pub(crate) settle_timeout: Duration,
    /// `None`: waits spin.
    pub(super) sleep: Option<Sleep>,
    /// A [`Loop`](crate::Loop) posts and polls, not the channel.
    pub(crate) of_loop: bool,
}

impl Core {
    /// [`count_credits`](Self::count_credits) comes next. The core points to itself, so it is in an `Arc`: a `Box`
    /// asserts that no other pointer to its content exists. A reset passes the `earlier` core, whose tokens and
    /// completions are recognised.
    ///
    /// # Safety
    ///
    /// The queue pair is live, and only [`destroy`](Self::destroy) destroys it while the core is used. Only this core
    /// posts to it and polls its completions, or a loop does both. `settings.sleep` has its completion queue. The
    /// memory of `credit_words` stays registered while the core is used, and until the queue pair was reset
    /// or destroyed; nothing else accesses it.
    pub(super) unsafe fn new(
        queue_pair: *mut ffi::ibv_qp,
        settings: CoreSettings,
        credit_words: Option<CreditWords>,
        table: InFlight,
        earlier: Option<&Self>,
    ) -> Arc<Self> {
        // SAFETY: the caller vouches for the queue pair, and so for its parents.
        let (number, target, poller, clock) = unsafe {
            let ffi::ibv_qp { send_cq, qp_num, context, .. } = *queue_pair;
            let poller = CqPoller::new(send_cq, settings.of_loop);
            (qp_num, Target::new(queue_pair), poller, Clock::of(context))
        };
        if let Some(earlier) = earlier {
            table.begin(earlier.table.end_connection());
        }
        let core = Arc::new(Self {
            queue_pair,
            number,
            identity: earlier.map_or_else(
                || NEXT_IDENTITY.fetch_add(1, Ordering::Relaxed),
                |earlier| earlier.identity,
            ),
            target: Cell::new(target),
            prepared: UnsafeCell::new(Templates::new()),
            blocking_id: Cell::new(0),
            fast_path: Cell::new(false),
            poller,
            table,
            settings,
            credits: credit_words.map(|words| Box::new(Credits::new(words, clock))),
            cancel: earlier.map_or_else(OnceCell::new, |earlier| earlier.cancel.clone()),
            destroyed: Cell::new(false),
            found_in_error: Cell::new(false),
            checked_at: Cell::new(None),
            clock,
            unreported: Unreported::default(),
        });
        // SAFETY: the core does not move any more; `post_raw` gets its pointer from the same cell.
        unsafe { Templates::set_piece_pointers(core.prepared.get()) };
        core
    }

    /// The queue pair is live.
    pub(crate) fn srq(&self) -> *mut ffi::ibv_srq {
        // SAFETY: the callers have not destroyed it.
        unsafe { (*self.queue_pair).srq }
    }

    /// The queue pair is in INIT, and nothing is in flight.
    pub(super) fn open_receives(&self) {
        if let Some(credits) = &self.credits {
            credits.open();
        }
        self.table.open_receives();
        self.blocking_id.set(self.table.blocking().wr_id());
        self.update_fast_path();
    }

    /// The queue pair is connected. Only receives posted since `open_receives` are in flight.
    pub(super) fn open(&self) {
        if !self.table.is_open_for_receives() {
            self.open_receives();
        }
        // Else no fast path: a loop alone posts, or sends need credit.
        self.table.open_sends(self.credits.is_none() && !self.settings.of_loop);
        self.update_fast_path();
    }

    /// Does nothing if a failure has stopped the channel since its receives were opened.
    #[cfg(feature = "rdmacm")]
    pub(crate) fn open_unless_stopped(&self) {
        if self.table.is_open_for_receives() {
            self.open();
        }
    }

    pub(super) fn close(&self) {
        self.table.close();
        self.update_fast_path();
    }

    #[inline]
    pub(super) fn update_fast_path(&self) {
        let idle = self.table.has_fast_path() && !self.table.any_in_use();
        self.fast_path.set(idle && self.poller.is_empty());
    }

    #[cold]
    pub(super) fn refusal(&self, queue: Queue) -> TransportError {
        if self.destroyed.get() {
            TransportError::Closed
        } else if self.table.is_closed() {
            TransportError::Stopped
        } else if queue == Queue::Send && self.table.is_open_for_receives() {
            TransportError::NotConnected
        } else if self.settings.of_loop {
            TransportError::OfLoop
        } else {
            TransportError::QueueFull
        }
    }

    /// Within a scope `table.release` is enough: no blocking operation can run before the scope has ended.
    #[inline]
    pub(super) fn release(&self, slot: &Slot) {
        self.table.release(slot);
        self.update_fast_path();
    }

    pub(super) fn ended_by_force(&self) -> TransportError {
        if self.destroyed.get() { TransportError::Closed } else { TransportError::Stopped }
    }

    /// Frees the slot too.
    pub(super) fn take_result(&self, slot: &Slot) -> TransportResult<WorkSuccess> {
        let result = self.result(slot);
        self.release(slot);
        result
    }

    pub(super) fn result(&self, slot: &Slot) -> TransportResult<WorkSuccess> {
        match slot.state() {
            state if state.is_done() => Ok(slot.completion().result()?),
            State::Discarded | State::UnscopedDiscarded => Err(self.ended_by_force()),
            _ => Err(TransportError::UnknownWork),
        }
    }
}

debug! {
    Core, self,
    number: self.number, depth: self.table.slots().len(), in_use: self.table.in_use(),
    open: self.table.is_open(), destroyed: self.destroyed.get(), ..
}
