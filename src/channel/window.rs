//! Windows: several requests of a scope with one doorbell and one completion.
//!
//! A window completes by the slot of its last request. The places of the others are slots too: those behind the first,
//! as far as they are free ([`Slot::run`]), and else any, which are linked. The device completes the last request, and
//! those that fail or are flushed: a failure ends the window when the last one has completed, since only then the device
//! has let go of all buffers.

use std::mem::{ManuallyDrop, MaybeUninit};
use std::time::Instant;
use std::{fmt, iter};

use super::core::{Core, OneThread};
use super::credits::NO_CREDIT;
use super::error::{TransportError, TransportResult};
use super::generation::{LEADERS, member};
use super::in_flight::InFlight;
use super::operation::Queue;
use super::slot::{NO_SLOT, Owner, Slot, State};
use super::wait::Wait;
use super::window_list::NotPosted;
use super::window_requests::WindowRequests;
use super::window_requests::sealed::Filling;
use crate::completion::{WorkCompletion, WorkSuccess};
use crate::debug::debug;

/// Why a window failed, with its buffers.
pub struct WindowError<B> {
    /// The reason: as of a post or of a wait in a [`Scope`](crate::Scope).
    pub error: TransportError,
    /// The request that failed or was refused, counted from 0, if it was one.
    pub request: Option<usize>,
    /// All buffers, unless the window is still in flight, since only the wait has failed. They stay borrowed then until
    /// the scope has ended.
    pub buffers: Option<B>,
}

impl<B> fmt::Debug for WindowError<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl<B> fmt::Display for WindowError<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(request) = self.request {
            write!(f, "request {} of the window, counted from 1: ", request + 1)?;
        }
        self.error.fmt(f)
    }
}

impl<B> std::error::Error for WindowError<B> {}

impl<B> From<WindowError<B>> for TransportError {
    /// Drops the buffers.
    fn from(error: WindowError<B>) -> Self {
        error.error
    }
}

/// Several requests that were posted by [`Scope::post_window`](crate::Scope::post_window), and their buffers.
///
/// [`wait`](Self::wait) gives the buffers back. If the handle is dropped or forgotten, the requests go on, and the
/// buffers stay borrowed until the scope has ended. The scope then waits for them, and reports a failure.
#[must_use = "dropping it leaves the window to the scope"]
pub struct ScopedWindow<'scope, B> {
    core: &'scope Core,
    /// The slot that the window completes by.
    slot: &'scope Slot,
    /// As in `ScopedPendingWork`.
    buffers: MaybeUninit<B>,
    _one_thread: OneThread,
}

impl<B> Drop for ScopedWindow<'_, B> {
    /// Leaves the window to the scope. Soundness does not depend on this call.
    fn drop(&mut self) {
        // SAFETY: `new` initialised it, and `wait_with` reads it only from a value that is not dropped. The
        // buffers are borrowed: dropping them does not touch registered memory (the contract of `BorrowedBuffer`).
        unsafe { self.buffers.assume_init_drop() };
        self.core.leave_window(self.slot);
    }
}

impl<'scope, B> ScopedWindow<'scope, B> {
    #[inline]
    pub(super) fn new(core: &'scope Core, slot: &'scope Slot, buffers: B) -> Self {
        let buffers = MaybeUninit::new(buffers);
        Self { core, slot, buffers, _one_thread: OneThread::default() }
    }

    /// Waits until all requests have ended, however long that takes, and gives the buffers back. The success is that of
    /// the last request.
    ///
    /// # Errors
    ///
    /// Those of [`ScopedPendingWork::wait`](crate::ScopedPendingWork::wait): of the first request that failed, which
    /// [`request`](WindowError::request) names. The buffers come back with it.
    #[inline]
    pub fn wait(self) -> Result<(B, WorkSuccess), WindowError<B>> {
        self.wait_with(None)
    }

    /// As [`wait`](Self::wait), until the deadline has passed at the latest.
    ///
    /// # Errors
    ///
    /// Those of [`wait`](Self::wait), and
    ///
    ///  - [`TimedOut`](TransportError::TimedOut): the channel was stopped, and everything that was in flight has ended.
    #[inline]
    pub fn wait_until(self, deadline: Instant) -> Result<(B, WorkSuccess), WindowError<B>> {
        self.wait_with(Some(deadline))
    }

    #[inline(always)]
    fn wait_with(self, deadline: Option<Instant>) -> Result<(B, WorkSuccess), WindowError<B>> {
        let mut this = ManuallyDrop::new(self);
        match this.core.wait_for_window(this.slot, deadline) {
            // SAFETY: `new` initialised it, and it is read once: `this` is consumed and not dropped. The window
            // has ended.
            Ok(success) => Ok((unsafe { this.buffers.assume_init_read() }, success)),
            Err(Failure { error, request, ended }) => {
                // SAFETY: as above if the window has ended. Otherwise as in `drop`.
                let buffers = unsafe {
                    if ended {
                        Some(this.buffers.assume_init_read())
                    } else {
                        this.buffers.assume_init_drop();
                        None
                    }
                };
                Err(WindowError { error, request, buffers })
            }
        }
    }
}

debug! { impl[B] ScopedWindow<'_, B>, self, state: self.slot.state(), .. }

/// Why a wait for a window has failed.
struct Failure {
    error: TransportError,
    request: Option<usize>,
    /// Whether the device has let go of the buffers.
    ended: bool,
}

/// Free places for a window.
struct Places<'a> {
    /// The slot that it completes by.
    leader: &'a Slot,
    /// How many slots it gets from that one on.
    run: usize,
    /// How many others it needs.
    others: usize,
}

impl InFlight {
    /// The free slots of a queue that are no places of a window.
    pub(super) fn free_places(&self, queue: Queue) -> impl Iterator<Item = &Slot> {
        let slots = self.of(queue);
        let mut index = 0;
        iter::from_fn(move || {
            loop {
                let slot = slots.get(index)?;
                match slot.state().owner() {
                    Some(owner) if owner.is_window() => index += usize::from(slot.run.get()),
                    Some(_) => index += 1,
                    None => {
                        index += 1;
                        return Some(slot);
                    }
                }
            }
        })
    }

    /// Places for a window of `count` requests, if there are as many.
    #[inline]
    fn find_window(&self, count: usize) -> Option<Places<'_>> {
        let leader = self.free_slot(Queue::Send)?;
        let index = leader.index();
        if index >= LEADERS {
            return self.find_scattered(count, None);
        }
        // A free slot behind a place that is free is no place of a window: runs begin with a slot that is not free.
        let behind = &self.of(Queue::Send)[index as usize..];
        let run = if self.any_in_use() {
            let is_free = |slot: &&Slot| slot.state() == State::Free;
            behind.iter().take(count).take_while(is_free).count()
        } else {
            count.min(behind.len())
        };
        if run < count {
            return self.find_scattered(count, Some((leader, run)));
        }
        Some(Places { leader, run, others: 0 })
    }

    /// As `find_window`, if there is no run that is long enough.
    #[cold]
    #[inline(never)]
    fn find_scattered<'a>(
        &'a self,
        count: usize,
        run: Option<(&'a Slot, usize)>,
    ) -> Option<Places<'a>> {
        let (leader, run) = match run {
            Some(run) => run,
            None => (self.free_places(Queue::Send).find(|slot| slot.index() < LEADERS)?, 1),
        };
        let is_enough = self.free_places(Queue::Send).take(count).count() == count;
        is_enough.then_some(Places { leader, run, others: count - run })
    }

    /// Takes the places for a window that was posted.
    #[inline]
    fn take_window(&self, places: &Places<'_>) {
        let &Places { leader, run, others } = places;
        leader.run.set(run as u16);
        leader.next_ended.set(NO_SLOT);
        leader.set_state(State::InFlight(Owner::Window));
        self.count_taken_in_scope();
        self.set_next_send(&self.of(Queue::Send)[leader.index() as usize + run - 1]);
        if others > 0 {
            self.take_others(leader, others);
        }
    }

    #[cold]
    #[inline(never)]
    fn take_others(&self, leader: &Slot, others: usize) {
        for _ in 0..others {
            // A slot that was taken is not found again.
            let Some(slot) = self.free_places(Queue::Send).next() else { break };
            slot.next_ended.set(leader.next_ended.replace(slot.index()));
            slot.set_state(State::Seen);
            self.count_taken_in_scope();
        }
    }

    /// Frees all places of a window that has ended.
    #[inline]
    pub(super) fn release_window(&self, leader: &Slot) {
        let mut other = leader.next_ended.get();
        leader.free();
        self.count_released_in_scope(1);
        while let Some(slot) = self.slot(other as usize) {
            other = slot.next_ended.get();
            // The end of the scope may have freed it already.
            if slot.state() == State::Seen {
                slot.free();
                self.count_released_in_scope(1);
            }
        }
    }
}

impl Core {
    /// Posts the requests of a window. Returns its slot, and what they keep.
    ///
    /// # Safety
    ///
    /// Until the state of the slot says that the window has ended, the memory of what is kept is valid. Meanwhile nothing
    /// writes it, and if a request writes it, nothing reads it either.
    #[inline(always)]
    pub(super) unsafe fn post_window<W: WindowRequests>(
        &self,
        requests: W,
    ) -> Result<(&Slot, W::Buffers), WindowError<W::Buffers>> {
        let count = requests.count();
        let mut list = self.window.take().unwrap_or_default();
        let places = match list.reserve(count, &self.limits) {
            Ok(()) => self.table.find_window(count).ok_or_else(|| self.refusal(Queue::Send)),
            Err(error) => Err(error.into()),
        };
        let places = match places {
            Ok(places) => places,
            Err(error) => {
                self.window.set(Some(list));
                return Err(WindowError {
                    error,
                    request: None,
                    buffers: Some(requests.fill(None)),
                });
            }
        };
        let window = list.begin(places.leader.wr_id());
        let mut filling = Filling { limits: &self.limits, window, error: None };
        let buffers = requests.fill(Some(&mut filling));
        let Filling { window, error, .. } = filling;
        if let Some((request, error)) = error {
            self.window.set(Some(list));
            return Err(WindowError { error, request: Some(request), buffers: Some(buffers) });
        }
        // SAFETY: there is a free slot, so the queue pair is live, and the functions were given for it. The caller
        // vouches for the memory of what is kept; bytes that are copied are borrowed by `W`, and valid until this
        // returns. Nothing else accesses the requests. There is at least one, and each was added.
        let posted = unsafe { window.post(self.target.get()) };
        self.window.set(Some(list));
        match posted {
            Ok(()) => {
                self.table.take_window(&places);
                Ok((places.leader, buffers))
            }
            Err(failure) => {
                let (error, request) = self.window_refused::<W>(&places, count, &failure);
                Err(WindowError { error, request, buffers: Some(buffers) })
            }
        }
    }

    /// The error of a window that was not posted, or not as a whole. The device has none of its requests any more.
    #[cold]
    #[inline(never)]
    fn window_refused<W: WindowRequests>(
        &self,
        places: &Places<'_>,
        count: usize,
        failure: &NotPosted,
    ) -> (TransportError, Option<usize>) {
        if failure.returned == NO_CREDIT && W::TAKE_RECEIVES {
            return (self.refuse_without_credit(count as u32), None);
        }
        let error = failure.error().into();
        if failure.posted == 0 {
            return (error, Some(0));
        }
        if failure.posted < count {
            self.stop_unsignaled(W::WRITES);
            return (error, Some(failure.posted));
        }
        // The device may have all of them, and the last one has a completion.
        self.table.take_window(places);
        if !self.try_stop() && W::WRITES {
            self.stop();
        }
        self.free_window(places.leader);
        (error, None)
    }

    /// Waits until the window of this slot has ended, takes its result and frees its places. If polling fails, it is left
    /// to the scope.
    #[inline]
    fn wait_for_window(
        &self,
        slot: &Slot,
        deadline: Option<Instant>,
    ) -> Result<WorkSuccess, Failure> {
        if let Some(completion) = self.success_now(slot) {
            if slot.state().owner() == Some(Owner::Window) {
                // SAFETY: it points to an entry of the batch or into the slot, and is initialised; for the rest see
                // `poll_raw`.
                let success = WorkSuccess::from_raw(unsafe { *completion.as_ptr() });
                self.table.release_window(slot);
                return Ok(success);
            }
            // A device has completed the last request after another one has failed.
            slot.set_state(State::Done(Owner::FailedWindow));
        }
        self.wait_for_window_slowly(slot, deadline)
    }

    #[cold]
    #[inline(never)]
    fn wait_for_window_slowly(
        &self,
        slot: &Slot,
        deadline: Option<Instant>,
    ) -> Result<WorkSuccess, Failure> {
        let mut settled = self.settle_rest();
        let mut wait = Wait::new(deadline);
        while slot.state().is_outstanding() {
            match settled {
                Ok(true) => {}
                Ok(false) => {
                    if let Err(error) = self.on_empty_poll(&mut wait) {
                        self.stop();
                        self.free_window(slot);
                        return Err(Failure { error, request: None, ended: true });
                    }
                }
                Err(error) => {
                    self.leave_window(slot);
                    return Err(Failure { error, request: None, ended: false });
                }
            }
            settled = self.settle();
        }
        let failed = matches!(slot.state(), State::Done(_)).then(|| self.failed_request(slot));
        self.take_window_result(slot).map_err(|error| Failure {
            error,
            request: failed,
            ended: true,
        })
    }

    /// Takes the result of a window that has ended, and frees its places.
    pub(super) fn take_window_result(&self, slot: &Slot) -> TransportResult<WorkSuccess> {
        let result = self.result(slot);
        self.free_window(slot);
        result
    }

    /// As [`Core::release`], for a window.
    fn free_window(&self, slot: &Slot) {
        self.table.release_window(slot);
        self.update_fast_path();
    }

    /// Which request of a window that is done has failed, if one has.
    fn failed_request(&self, slot: &Slot) -> usize {
        let completion = slot.completion();
        member(completion.wr_id()).map_or_else(|| self.window_len(slot) - 1, |(_, at)| at)
    }

    /// The number of requests of a window.
    fn window_len(&self, slot: &Slot) -> usize {
        let (mut len, mut other) = (usize::from(slot.run.get()), slot.next_ended.get());
        while let Some(slot) = self.table.slot(other as usize) {
            (len, other) = (len + 1, slot.next_ended.get());
        }
        len
    }

    /// The last request of a window has completed, of which one has failed, or whose handle was dropped.
    pub(super) fn end_window(&self, slot: &Slot, owner: Owner, completion: &WorkCompletion) {
        if owner == Owner::FailedWindow {
            slot.set_state(State::Done(owner));
            return;
        }
        self.unreported.unpolled.set(true);
        if let Err(error) = completion.result() {
            self.record_unreported(error.into());
        }
        self.free_window(slot);
    }

    /// Stores the failure of a request that is not the last of its window. Returns false if the completion is not of one.
    pub(super) fn take_window_failure(&self, completion: &WorkCompletion) -> bool {
        let Some((last, position)) = member(completion.wr_id()) else { return false };
        let is_ours = completion.queue_pair_number() == self.number;
        let Some(slot) = self.table.slot_of(last).filter(|_| is_ours) else { return false };
        let State::InFlight(owner) = slot.state() else { return false };
        if !owner.is_window() || position >= self.window_len(slot) - 1 {
            return false;
        }
        // A success says nothing: the last one is to come.
        if let Err(error) = completion.result() {
            match owner {
                Owner::Window => {
                    slot.complete(owner, completion.as_raw());
                    slot.set_state(State::InFlight(Owner::FailedWindow));
                }
                Owner::LostWindow => self.record_unreported(error.into()),
                _ => {}
            }
        }
        true
    }

    /// The handle of a window was dropped.
    fn leave_window(&self, slot: &Slot) {
        let failure = || slot.completion().result().err();
        match slot.state() {
            State::InFlight(owner) => {
                if owner == Owner::FailedWindow
                    && let Some(error) = failure()
                {
                    self.record_unreported(error.into());
                }
                slot.set_state(State::InFlight(Owner::LostWindow));
            }
            State::Done(_) => {
                self.unreported.unpolled.set(true);
                if let Some(error) = failure() {
                    self.record_unreported(error.into());
                }
                self.table.release_window(slot);
            }
            State::Discarded(_) => self.table.release_window(slot),
            State::Free | State::Abandoned | State::Seen => {}
        }
    }
}
