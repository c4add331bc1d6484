//! What a channel posts with and polls with.
//!
//! A [`Core`] is the part of a channel that the data path touches: the raw queue pair and completion
//! queue, a request that is prepared once, and the table of what is in flight. It is full of cells,
//! which change through a shared reference, as a scope hands out handles that poll independently; all
//! of it happens on one thread at a time.
//!
//! # Which completion is whose
//!
//! A work request is numbered `epoch << 32 | index`. The index is its slot in the table; the epoch
//! is drawn from a counter of the process each time that a queue pair is made or reset, so that what
//! an earlier life of the queue pair (or of its number) left in a completion queue is recognised and
//! dropped. A completion counts if it names this queue pair, this epoch and a slot that is in
//! flight. Anything else is [`UnknownCompletion`](TransportError::UnknownCompletion).

use std::cell::{Cell, UnsafeCell};
use std::ffi::c_int;
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use super::completions::poll_routed;
use super::error::{TransportError, TransportResult};
use super::in_flight::{BLOCKING, InFlight, Owner, Slot};
use super::operation::{Operation, Prepared};
use super::shared_completion_queue::{Inbox, Router};
use super::wait::{Patience, Sleep};
use crate::completion::{WorkError, WorkSuccess};
use crate::ffi;

/// The next epoch. It begins at 1, so that a small number is never taken for a request of ours.
static EPOCH: AtomicU32 = AtomicU32::new(1);

/// An epoch that no other queue pair of this process has, or had in the last 4 billion ones.
pub(crate) fn new_epoch() -> u32 {
    EPOCH.fetch_add(1, Ordering::Relaxed)
}

/// See the [module](self).
pub(crate) struct Core {
    /// Live until `destroyed`: its owner holds it beside the core.
    pub(crate) queue_pair: *mut ffi::ibv_qp,
    /// The number of the queue pair, for when it is gone.
    pub(crate) number: u32,
    /// The upper half of all current request numbers.
    pub(crate) epoch: Cell<u64>,
    /// Completions with an epoch from here on, and before the current one, are left from earlier.
    pub(crate) first_epoch: u32,
    /// The epoch that the core was made in, by which tokens know it.
    pub(crate) identity: u32,
    /// The epoch in which it was connected, the last time.
    connection: Cell<u64>,
    /// What everything is posted with. It is accessed through pointers only, never by reference.
    prepared: UnsafeCell<Prepared>,
    /// What finds completions, and where: the provider, in the completion queue, or the router.
    pub(crate) poll_cq: Cell<PollCq>,
    pub(crate) polled: Cell<*mut ffi::ibv_cq>,
    /// The number of blocking operations.
    blocking_id: Cell<u64>,
    /// Blocking operations need not look at anything before they post: the channel is open, nothing
    /// else is in flight, and the completion queue is its own.
    unhindered: Cell<bool>,
    /// Where completions are polled to, one at a time. It is initialised once: a provider need not
    /// write what a completion leaves undefined.
    pub(crate) completion: UnsafeCell<ffi::ibv_wc>,
    pub(crate) table: InFlight,
    /// Whether the request number of blocking operations is in flight while something else polls.
    pub(crate) blocking: Cell<bool>,
    pub(crate) max_send_sge: u32,
    pub(crate) max_recv_sge: u32,
    pub(crate) max_inline_data: u32,
    /// Whether it is a reliable connection.
    pub(crate) reliable: bool,
    /// Who else uses the completion queue. `polled` points to it.
    pub(crate) router: Option<(Arc<Router>, Inbox)>,
    /// What to sleep on, if anything.
    pub(crate) sleep: Option<Sleep>,
    /// The queue pair was destroyed by `stop`.
    pub(crate) destroyed: Cell<bool>,
    pub(crate) settle_timeout: Duration,
    pub(crate) left: Left,
}

/// As `struct ibv_context_ops` has it.
pub(crate) type PollCq = unsafe extern "C" fn(*mut ffi::ibv_cq, c_int, *mut ffi::ibv_wc) -> c_int;

/// What a scope left behind that its end must tell.
#[derive(Debug, Default)]
pub(crate) struct Left {
    /// A handle was dropped before its result was seen.
    pub(crate) unpolled: Cell<bool>,
    /// The first failure among such.
    pub(crate) error: Cell<Option<WorkError>>,
}

// SAFETY: the queue pair and the completion queue may be used from any thread, one at a time or not
// (libibverbs locks); the pointers stay valid wherever the core is, as its owner moves with it. All
// else is owned, and `Send`.
unsafe impl Send for Core {}
// SAFETY: whatever changes a core comes from its link's owner, who has it exclusively, or from a scope
// and its handles, which have borrowed it exclusively from that owner and stay on one thread, as
// `OneThread` makes them. Through a shared reference to the owner, cells are only read.
unsafe impl Sync for Core {}

/// Makes a type neither `Send` nor `Sync`.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct OneThread(PhantomData<*const ()>);

/// What a core is made with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CoreSettings {
    pub(crate) max_send_wr: u32,
    pub(crate) max_recv_wr: u32,
    pub(crate) capacities: ffi::ibv_qp_cap,
    pub(crate) reliable: bool,
    pub(crate) settle_timeout: Duration,
    pub(crate) sleep: Option<Sleep>,
}

impl Core {
    /// The core of a queue pair that is not connected yet. It points into itself, and so stays where
    /// it is: in an `Arc`, since a `Box` would claim that nothing else points there.
    ///
    /// # Safety
    ///
    /// The queue pair is live, and its holder does not destroy it while the core may be used, other
    /// than through `destroyed`. Its requests go out through this core alone, which alone polls their
    /// completions. What the settings name to sleep on is its completion queue.
    pub(crate) unsafe fn new(
        queue_pair: *mut ffi::ibv_qp,
        settings: &CoreSettings,
        router: Option<(Arc<Router>, Inbox)>,
    ) -> Arc<Self> {
        let epoch = new_epoch();
        // SAFETY: the caller vouches for the queue pair, and with it for its parents.
        let (completion_queue, number, poll_cq, prepared) = unsafe {
            let ffi::ibv_qp { send_cq, qp_num, .. } = *queue_pair;
            (send_cq, qp_num, (*(*send_cq).context).ops.poll_cq, Prepared::new(queue_pair))
        };
        let core = Arc::new(Self {
            queue_pair,
            number,
            epoch: Cell::new(u64::from(epoch) << 32),
            first_epoch: router.as_ref().map_or(epoch, |(router, _)| router.first_epoch()),
            identity: epoch,
            connection: Cell::new(0),
            prepared: UnsafeCell::new(prepared),
            // As for `Prepared`: it is set, once.
            poll_cq: Cell::new(poll_cq.expect("libibverbs sets it")),
            polled: Cell::new(completion_queue),
            blocking_id: Cell::new(0),
            unhindered: Cell::new(false),
            completion: UnsafeCell::default(),
            table: InFlight::new(settings.max_send_wr, settings.max_recv_wr),
            blocking: Cell::new(false),
            max_send_sge: settings.capacities.max_send_sge,
            max_recv_sge: settings.capacities.max_recv_sge,
            max_inline_data: settings.capacities.max_inline_data,
            reliable: settings.reliable,
            router,
            sleep: settings.sleep,
            destroyed: Cell::new(false),
            settle_timeout: settings.settle_timeout,
            left: Left::default(),
        });
        if let Some(route) = &core.router {
            core.polled.set(std::ptr::from_ref(route).cast_mut().cast());
            core.poll_cq.set(poll_routed);
        }
        // SAFETY: the core stays where it is; `post_raw` gets the pointer from the same cell.
        unsafe {
            Prepared::settle(core.prepared.get());
            core.table.belong(&raw const *core);
        }
        core
    }

    #[inline]
    pub(crate) fn queue_pair(&self) -> *mut ffi::ibv_qp {
        self.queue_pair
    }

    /// Begins a new epoch: completions of requests that were posted before count no more.
    pub(crate) fn renew(&self) {
        self.epoch.set(u64::from(new_epoch()) << 32);
    }

    /// The queue pair is connected, and nothing is in flight.
    pub(crate) fn open(&self) {
        self.renew();
        self.connection.set(self.epoch.get());
        self.blocking_id.set(self.epoch.get() | u64::from(BLOCKING));
        self.table.open(self.epoch.get());
        self.look();
    }

    /// Nothing can be posted any more.
    pub(crate) fn close(&self) {
        self.table.close();
        self.look();
    }

    /// Looks whether anything hinders blocking operations, after a change.
    pub(crate) fn look(&self) {
        let clear = self.table.is_open() && self.table.in_use() == 0;
        self.unhindered.set(clear && self.router.is_none());
    }

    /// Why nothing can be posted to a queue.
    #[cold]
    fn refusal(&self) -> TransportError {
        if self.destroyed.get() {
            TransportError::Closed
        } else if self.table.is_open() {
            TransportError::QueueFull
        } else {
            TransportError::Stopped
        }
    }

    /// Posts an operation whose result `owner` will ask for; returns its slot.
    ///
    /// # Safety
    ///
    /// Until the operation has ended (the state of its slot says so), the memory in `list` is there,
    /// and is not written, or not accessed at all, as the operation needs it.
    #[inline(always)]
    pub(crate) unsafe fn post<O: Operation>(
        &self,
        operation: O,
        list: &mut [ffi::ibv_sge],
        owner: Owner,
    ) -> TransportResult<&Slot> {
        operation.check(self, list)?;
        let Some(slot) = self.table.take(O::QUEUE, owner) else { return Err(self.refusal()) };
        if owner == Owner::Token {
            self.look();
        }
        // SAFETY: slots are given out only while the queue pair is live; the caller vouches for the
        // memory.
        let returned = unsafe { self.post_raw(operation, slot.wr_id(), list) };
        if returned != 0 {
            return Err(self.not_posted::<O>(slot, returned));
        }
        Ok(slot)
    }

    /// # Safety
    ///
    /// As [`Operation::post`].
    #[inline(always)]
    unsafe fn post_raw<O: Operation>(
        &self,
        operation: O,
        wr_id: u64,
        list: &mut [ffi::ibv_sge],
    ) -> c_int {
        // SAFETY: the caller vouches for the queue pair and the memory. Nothing in between comes back
        // to this function, which alone accesses the requests, and one thread at a time uses the core.
        unsafe { operation.post(self.prepared.get(), wr_id, list) }
    }

    /// Posts an operation and waits until it has ended, whatever that takes.
    ///
    /// # Safety
    ///
    /// For the duration of the call, the memory in `list` is there, and is not written, or not
    /// accessed at all, as the operation needs it.
    #[inline(always)]
    pub(crate) unsafe fn run<O: Operation>(
        &self,
        operation: O,
        list: &mut [ffi::ibv_sge],
        deadline: Option<Instant>,
    ) -> TransportResult<WorkSuccess> {
        operation.check(self, list)?;
        if !self.unhindered.get() {
            // A copy of the only piece: were it shown to a function that is not inlined, it could not
            // be in registers elsewhere either.
            let mut only;
            let list = match list {
                [piece] => {
                    only = [*piece];
                    &mut only[..]
                }
                list => list,
            };
            // SAFETY: the caller vouches for the memory.
            unsafe { self.run_hindered(operation, list, deadline) }?;
            return Ok(self.success());
        }
        let wr_id = self.blocking_id.get();
        // SAFETY: the table is open, so the queue pair is live; the caller vouches for the memory.
        let returned = unsafe { self.post_raw(operation, wr_id, list) };
        if returned != 0 {
            let error = ffi::failed(O::VERB, returned);
            self.take_back::<O>(None);
            return Err(error.into());
        }
        let found = self.poll_raw();
        if !self.is_success(found, wr_id) {
            self.run_on(found, deadline)?;
        }
        Ok(self.success())
    }

    /// As `run`, where there is more to heed. On success the completion is the one that was polled
    /// last.
    ///
    /// # Safety
    ///
    /// As for [`run`](Self::run).
    #[inline(never)]
    unsafe fn run_hindered<O: Operation>(
        &self,
        operation: O,
        list: &mut [ffi::ibv_sge],
        deadline: Option<Instant>,
    ) -> TransportResult<()> {
        if !self.table.has_room(O::QUEUE) {
            return Err(self.refusal());
        }
        // SAFETY: there is a free slot, so the queue pair is live; the caller vouches for the memory.
        let returned = unsafe { self.post_raw(operation, self.blocking_id.get(), list) };
        if returned != 0 {
            let error = ffi::failed(O::VERB, returned);
            self.take_back::<O>(None);
            return Err(error.into());
        }
        self.run_on(self.poll_raw(), deadline)
    }

    /// The rest of `run`, when the first poll did not find the completion, or a failure. On success
    /// the completion is the one that was polled last.
    #[inline(never)]
    fn run_on(&self, mut found: c_int, deadline: Option<Instant>) -> TransportResult<()> {
        let (wr_id, mut patience) = (self.blocking_id.get(), Patience::new(deadline));
        loop {
            let passed = match self.found(found) {
                Ok(Some(completion)) if self.is(&completion, wr_id) => {
                    return Ok(completion.result().map(drop)?);
                }
                Ok(Some(completion)) => self.dispatch(&completion).map(drop),
                Ok(None) => patience.spent(self),
                Err(error) => Err(error),
            };
            if let Err(error) = passed {
                return Err(self.abandon_blocking(error));
            }
            found = self.poll_raw();
        }
    }

    #[cold]
    fn not_posted<O: Operation>(&self, slot: &Slot, returned: c_int) -> TransportError {
        let error = ffi::failed(O::VERB, returned).into();
        self.take_back::<O>(Some(slot));
        error
    }

    /// Sees to it that the device does not have what could not be posted: a blocking operation, or
    /// that in a slot, which is free then.
    #[cold]
    #[inline(never)]
    fn take_back<O: Operation>(&self, slot: Option<&Slot>) {
        // SAFETY: as in `post_raw`.
        if unsafe { Prepared::may_be_posted(self.prepared.get(), O::QUEUE) } {
            self.blocking.set(slot.is_none());
            // What the device at most reads can be given back in any case.
            if !self.try_stop() && O::WRITES {
                self.stop();
            }
            self.blocking.set(false);
        }
        if let Some(slot) = slot {
            self.release(slot);
        }
    }

    /// Gives a slot back; not on the data path of scopes, where nothing else depends on it.
    pub(crate) fn release(&self, slot: &Slot) {
        self.table.release(slot);
        self.look();
    }

    /// Ends a blocking operation that cannot be waited for any longer.
    #[cold]
    fn abandon_blocking(&self, error: TransportError) -> TransportError {
        self.blocking.set(true);
        self.stop();
        error
    }

    /// Whether a blocking operation is still with the device.
    pub(crate) fn is_blocking(&self) -> bool {
        self.blocking.get()
    }

    /// The blocking operation has ended without a completion.
    pub(crate) fn lose_blocking(&self) {
        self.blocking.set(false);
    }

    /// Whether `wr_id` was given out since the channel was connected, the last time.
    pub(crate) fn is_of_connection(&self, wr_id: u64) -> bool {
        wr_id & !u64::from(u32::MAX) == self.connection.get()
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
