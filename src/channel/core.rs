//! What a channel posts with and polls with.
//!
//! A [`Core`] is the part of a channel that the data path uses: the raw queue pair and completion
//! queue, the prepared requests, and the table of what is in flight. Its fields are cells, because a
//! scope and its handles share it by reference, and each of them posts or polls. One thread at a time
//! uses it.
//!
//! [`sink`](super::sink) finds the operations that completions belong to.

use std::cell::{Cell, OnceCell, UnsafeCell};
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::credits::{CreditWords, Credits};
use super::error::{TransportError, TransportResult};
use super::in_flight::InFlight;
use super::operation::{Limits, Queue, Target, Templates};
use super::sink::Sink;
use super::slot::{Slot, State};
use super::wait::{Cancel, Sleep};
use crate::completion::WorkSuccess;
use crate::debug::debug;
use crate::device::Clock;
use crate::ffi;

/// See the [module](self).
pub(super) struct Core {
    /// Live until `destroyed`: the owner of the core owns it too.
    pub(super) queue_pair: *mut ffi::ibv_qp,
    /// The number of the queue pair. It stays readable after the queue pair was destroyed.
    pub(super) number: u32,
    /// Names the channel: no other channel of the process has it. After a reset it is the same.
    pub(super) identity: u64,
    /// Where they are posted to.
    pub(super) target: Cell<Target>,
    /// The requests, prepared. Accessed through pointers only, never by reference.
    pub(super) prepared: UnsafeCell<Templates>,
    /// The request number of blocking operations.
    pub(super) blocking_id: Cell<u64>,
    /// Whether blocking operations can skip all checks before they post: the channel is open, nothing
    /// else is in flight, and the sink is empty.
    pub(super) fast_path: Cell<bool>,
    /// The function that polls, and the completions of the last poll.
    pub(super) sink: Sink,
    pub(super) table: InFlight,
    pub(super) limits: Limits,
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
    /// When the last check was that no wait has made.
    pub(super) checked_at: Cell<Option<Instant>>,
    pub(super) settle_timeout: Duration,
    /// Whether a [`Loop`](crate::Loop) posts and polls: the channel itself does neither.
    pub(super) of_loop: bool,
    /// By which `settle_timeout` passes, and the pauses between questions for credit.
    pub(super) clock: Clock,
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
// pointers stay valid on every thread: the core's owner, the link, holds what they point to for as long as
// anything uses the core's pointers. All other fields are the core's own, and `Send`.
unsafe impl Send for Core {}
// SAFETY: only two things change a core: its link's owner, which holds it exclusively; and a scope with
// its handles, which borrow it exclusively from that owner and are tied to one thread by `OneThread`.
// A shared reference to the owner only reads cells.
//
// In a loop, the table refers to the core too (`Aside::core`), and is used by who has the loop exclusively: its owner, or the
// holder of its lock. The link may be out of the loop meanwhile, with another thread. If that thread changes what the table
// looks at (`Loop::close`, `take_out`, and what ends a channel), the table has no reference to the core until the link is back.
// Otherwise (`Loop::borrow_out`) they never touch the same cell, unless both only read it:
//
//  - the thread with the link changes `checked_at` and `found_in_error`, when it asks for the state of the queue pair, and
//    `credits.peer`, while no send is open that would ask the peer; it reads `destroyed`;
//  - the holder of the loop changes `unreported.error`, the other cells of `credits`, and, when the connection manager
//    establishes the connection, `table.open`; it reads `destroyed`.
unsafe impl Sync for Core {}

/// The next [`Core::identity`].
static NEXT_IDENTITY: AtomicU64 = AtomicU64::new(0);

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
    pub(super) of_loop: bool,
}

impl Core {
    /// The core of a queue pair that is not connected yet. It contains pointers to itself, so it must not
    /// move. With flow control, [`count_credits`](Self::count_credits) comes next. It is in an `Arc`, because a `Box` asserts that it is the only pointer to its content.
    /// `earlier` is the core that this one replaces when the channel is reset, so that tokens and
    /// completions of the earlier core are recognised.
    ///
    /// # Safety
    ///
    /// The queue pair is live, and only [`destroy`](Self::destroy) destroys it while the core is used.
    /// Only this core posts to it, and only this core polls its completions, or a loop does both. The
    /// queue in `settings.sleep` is its completion queue. The memory of `settings.credit_words` stays
    /// registered while the core is used, and until the queue pair was reset or destroyed; nothing else
    /// accesses it.
    pub(super) unsafe fn new(
        queue_pair: *mut ffi::ibv_qp,
        settings: &CoreSettings,
        table: InFlight,
        earlier: Option<&Self>,
    ) -> Arc<Self> {
        // SAFETY: the caller vouches for the queue pair, and with it for its parents.
        let (number, target, sink, clock) = unsafe {
            let ffi::ibv_qp { send_cq, qp_num, context, .. } = *queue_pair;
            let sink = Sink::new(send_cq, settings.of_loop);
            (qp_num, Target::new(queue_pair), sink, Clock::of(context))
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
            sink,
            table,
            limits: settings.limits,
            credits: settings.credit_words.map(|words| Box::new(Credits::new(words, clock))),
            sleep: settings.sleep,
            cancel: earlier.map_or_else(OnceCell::new, |earlier| earlier.cancel.clone()),
            destroyed: Cell::new(false),
            found_in_error: Cell::new(false),
            checked_at: Cell::new(None),
            settle_timeout: settings.settle_timeout,
            of_loop: settings.of_loop,
            clock,
            unreported: Unreported::default(),
        });
        // SAFETY: the core does not move any more; `post_raw` gets its pointer from the same cell.
        unsafe { Templates::set_piece_pointers(core.prepared.get()) };
        core
    }

    /// The settings that the core was made with.
    pub(super) fn settings(&self) -> CoreSettings {
        let Self { limits, settle_timeout, sleep, of_loop, .. } = *self;
        let credit_words = self.credits.as_deref().map(Credits::words);
        CoreSettings { limits, settle_timeout, sleep, credit_words, of_loop }
    }

    /// Whether the transport is a reliable connection.
    pub(super) fn is_reliable(&self) -> bool {
        self.limits.reliable
    }

    /// The shared receive queue that feeds it, or null. The queue pair is live.
    pub(super) fn srq(&self) -> *mut ffi::ibv_srq {
        // SAFETY: the callers have not destroyed it.
        unsafe { (*self.queue_pair).srq }
    }

    #[inline]
    pub(super) fn queue_pair(&self) -> *mut ffi::ibv_qp {
        self.queue_pair
    }

    /// Lets receives be posted. The queue pair is in INIT, and nothing is in flight.
    pub(super) fn open_receives(&self) {
        if let Some(credits) = &self.credits {
            credits.open();
        }
        self.table.open_receives();
        self.blocking_id.set(self.table.blocking().wr_id());
        self.update_fast_path();
    }

    /// Lets everything be posted. The queue pair is connected, and nothing is in flight
    /// but receives that were posted after `open_receives`.
    pub(super) fn open(&self) {
        if !self.table.is_open_for_receives() {
            self.open_receives();
        }
        if self.credits.is_none() && !self.of_loop {
            self.table.open_sends();
        } else {
            // Nothing at all must be posted, or a send needs credit, so there is no fast path.
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

    /// Computes `fast_path`, after every change of what it depends on.
    #[inline]
    pub(super) fn update_fast_path(&self) {
        let idle = self.table.is_open_for_all() && !self.table.any_in_use();
        self.fast_path.set(idle && self.sink.is_empty());
    }

    /// The reason why a queue has no free slot.
    #[cold]
    pub(super) fn refusal(&self, queue: Queue) -> TransportError {
        if self.destroyed.get() {
            TransportError::Closed
        } else if self.table.is_closed() {
            TransportError::Stopped
        } else if queue == Queue::Send && self.table.is_open_for_receives() {
            TransportError::NotConnected
        } else if self.of_loop {
            TransportError::OfLoop
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

    /// The error of an operation without a completion: the queue pair was destroyed or reset.
    pub(super) fn ended_by_force(&self) -> TransportError {
        if self.destroyed.get() { TransportError::Closed } else { TransportError::Stopped }
    }

    /// Takes the result of an operation that has ended, and frees its slot.
    pub(super) fn take_result(&self, slot: &Slot) -> TransportResult<WorkSuccess> {
        let result = self.result(slot);
        self.release(slot);
        result
    }

    /// The result of an operation that has ended.
    pub(super) fn result(&self, slot: &Slot) -> TransportResult<WorkSuccess> {
        match slot.state() {
            State::Done(_) | State::Seen => Ok(slot.completion().result()?),
            State::Discarded(_) => Err(self.ended_by_force()),
            _ => Err(TransportError::UnknownWork),
        }
    }
}

debug! {
    Core, self,
    number: self.number, depth: self.table.slots().len(), in_use: self.table.in_use(),
    open: self.table.is_open(), destroyed: self.destroyed.get(), ..
}
