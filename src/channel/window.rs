//! Windows: several requests with one doorbell and one completion.
//!
//! A window completes by the slot of its last request. Its other places are the free slots behind that
//! ([`Slot::run`]), and if they are too few, any others, linked. The device completes the last request, and those
//! that fail or are flushed. Only the last completion ends a window: then the device has let go of all buffers.

use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::time::Instant;
use std::{iter, ptr};

use super::core::{Core, OneThread};
use super::credits::NO_CREDIT;
use super::error::{TransportError, TransportResult};
use super::in_flight::InFlight;
use super::operation::Queue;
use super::prepared_window::{NotPosted, PreparedWindow, WindowError, WindowList};
use super::slot::{LEADERS, NO_SLOT, Owner, Slot, State, member, upper_half};
use crate::base::debug::debug;
use crate::base::ffi;
use crate::verbs::completion::{WorkCompletion, WorkSuccess};

/// A window that was posted by [`Scope::post_window`](crate::Scope::post_window).
///
/// [`wait`](Self::wait) gives it back. If the handle is dropped or forgotten, the requests go on, and the buffers stay
/// borrowed until the scope has ended. The scope then waits for them, and reports a failure.
#[must_use = "dropping it leaves the window to the scope"]
pub struct ScopedWindow<'scope, C> {
    core: &'scope Core,
    slot: &'scope Slot,
    /// In a box, so the compiler does not assume that the device has no access to the memory.
    window: PreparedWindow<C>,
    _one_thread: OneThread,
}

impl<C> Drop for ScopedWindow<'_, C> {
    /// Soundness does not depend on this. Dropping the borrowed buffers does not touch registered memory
    /// (`BorrowedBuffer`).
    fn drop(&mut self) {
        self.core.leave_window(self.slot);
    }
}

impl<'scope, C> ScopedWindow<'scope, C> {
    #[inline]
    pub(super) fn new(core: &'scope Core, slot: &'scope Slot, window: PreparedWindow<C>) -> Self {
        Self { core, slot, window, _one_thread: OneThread::default() }
    }

    /// Waits until all requests have ended, however long that takes, and gives the window back. The success is that of
    /// the last request.
    ///
    /// # Errors
    ///
    /// Those of [`ScopedPendingWork::wait`](crate::channel::ScopedPendingWork::wait): of the first request that failed, which
    /// [`request`](WindowError::request) names. The window comes back with it.
    #[inline(always)]
    pub fn wait(self) -> Result<(PreparedWindow<C>, WorkSuccess), WindowError<PreparedWindow<C>>> {
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
    pub fn wait_until(
        self,
        deadline: Instant,
    ) -> Result<(PreparedWindow<C>, WorkSuccess), WindowError<PreparedWindow<C>>> {
        self.wait_with(Some(deadline))
    }

    #[inline(always)]
    fn wait_with(
        self,
        deadline: Option<Instant>,
    ) -> Result<(PreparedWindow<C>, WorkSuccess), WindowError<PreparedWindow<C>>> {
        let this = ManuallyDrop::new(self);
        // SAFETY: it is read once: `this` is consumed and not dropped.
        let window = unsafe { ptr::read(&this.window) };
        match this.core.wait_for_window(this.slot, deadline) {
            Ok(success) => Ok((window, success)),
            Err(Failure { error, request, ended }) => {
                Err(WindowError { error, request, buffers: ended.then_some(window) })
            }
        }
    }
}

debug! { impl[C] ScopedWindow<'_, C>, self, state: self.slot.state(), .. }

struct Failure {
    error: TransportError,
    request: Option<usize>,
    /// The device has let go of the buffers.
    ended: bool,
}

impl InFlight {
    /// Not places of a window.
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

    /// The slot that the window completes by, if there are enough places. Its `run` is then set.
    #[inline(always)]
    fn find_window(&self, count: usize) -> Option<&Slot> {
        let leader = self.free_slot(Queue::Send)?;
        // The places of the last window here are free: nothing takes one of them before it takes this slot, or
        // `find_run` gives it to another window.
        let is_again = usize::from(leader.run.get()) == count
            && leader.run_generation.get().wrapping_add(1) == leader.generation();
        if is_again { Some(leader) } else { self.find_run(count, leader) }
    }

    #[inline(never)]
    fn find_run<'a>(&'a self, count: usize, mut leader: &'a Slot) -> Option<&'a Slot> {
        if leader.index() >= LEADERS {
            leader = self.free_places(Queue::Send).find(|slot| slot.index() < LEADERS)?;
        }
        // A free slot behind a free place is no place of a window: runs begin with a slot that is not free.
        let behind = &self.of(Queue::Send)[leader.index() as usize..];
        let is_free = |slot: &&Slot| slot.state() == State::Free;
        let free = behind.iter().take(count).take_while(is_free);
        // A window that began at one of these places is then no longer the last one there.
        let run = free.inspect(|slot| slot.run_generation.set(slot.generation())).count();
        leader.run.set(run as u16);
        let is_enough = run == count || self.free_places(Queue::Send).take(count).count() == count;
        is_enough.then_some(leader)
    }

    /// For the slot that `find_window` found, after the post.
    #[inline(always)]
    fn take_window(&self, leader: &Slot, count: usize) {
        let run = usize::from(leader.run.get());
        leader.run_generation.set(leader.generation());
        leader.next_ended.set(NO_SLOT);
        leader.set_state(State::InFlight(Owner::Window));
        self.count_taken_in_scope();
        self.set_next_send(&self.of(Queue::Send)[leader.index() as usize + run - 1]);
        if count > run {
            self.take_others(leader, count - run);
        }
    }

    #[cold]
    #[inline(never)]
    fn take_others(&self, leader: &Slot, others: usize) {
        for _ in 0..others {
            // A taken slot is not found again.
            let Some(slot) = self.free_places(Queue::Send).next() else { break };
            slot.next_ended.set(leader.next_ended.replace(slot.index()));
            slot.set_state(State::Seen);
            self.count_taken_in_scope();
        }
    }

    #[inline(always)]
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
    /// On failure, names the request to blame.
    ///
    /// # Safety
    ///
    /// Until the state of the slot says that the window has ended, the memory of its requests is valid. Meanwhile
    /// nothing writes it, and if a request writes it, nothing reads it.
    #[inline(always)]
    pub(super) unsafe fn post_window(
        &self,
        list: &mut WindowList,
    ) -> Result<&Slot, (TransportError, Option<usize>)> {
        if let Err(error) = list.check(&self.settings.limits) {
            return Err((error, None));
        }
        let Some(leader) = self.table.find_window(list.len()) else {
            return Err((self.refusal(Queue::Send), None));
        };
        let upper = upper_half(leader.index(), leader.generation());
        // SAFETY: a free slot means that the queue pair is live; the target is for it. The caller vouches for the
        // memory.
        match unsafe { list.post(self.target.get(), leader.wr_id(), upper) } {
            Ok(()) => {
                self.table.take_window(leader, list.len());
                Ok(leader)
            }
            Err(failure) => Err(self.window_refused(leader, list, &failure)),
        }
    }

    /// The device may still read the buffers, but not write them: see [`stop`](super::stop).
    #[cold]
    #[inline(never)]
    fn window_refused(
        &self,
        leader: &Slot,
        list: &WindowList,
        failure: &NotPosted,
    ) -> (TransportError, Option<usize>) {
        if failure.returned == NO_CREDIT && list.takes_receives {
            return (self.refuse_without_credit(list.len() as u32), None);
        }
        let error = failure.error().into();
        if failure.posted == 0 {
            return (error, Some(0));
        }
        if failure.posted < list.len() {
            self.stop_unsignaled(list.writes);
            return (error, Some(failure.posted));
        }
        // The device may have all of them, and the last one has a completion.
        self.table.take_window(leader, list.len());
        if !self.try_stop() && list.writes {
            self.stop();
        }
        self.free_window(leader);
        (error, None)
    }

    /// If polling fails, the window is left to the scope.
    #[inline(always)]
    fn wait_for_window(
        &self,
        slot: &Slot,
        deadline: Option<Instant>,
    ) -> Result<WorkSuccess, Failure> {
        let completion = match self.success_now(slot) {
            Some(completion) if slot.state().owner() == Some(Owner::Window) => {
                self.table.release_window(slot);
                completion
            }
            now => self.wait_for_window_slowly(slot, now.is_some(), deadline)?,
        };
        // SAFETY: it points to an initialised entry of the batch, or into the slot; for the rest see `poll_raw`.
        Ok(WorkSuccess::from_raw(unsafe { *completion.as_ptr() }))
    }

    #[cold]
    #[inline(never)]
    fn wait_for_window_slowly(
        &self,
        slot: &Slot,
        is_now: bool,
        deadline: Option<Instant>,
    ) -> Result<NonNull<ffi::ibv_wc>, Failure> {
        if is_now {
            // A device completed the last request after another one had failed.
            slot.set_state(State::Done(Owner::FailedWindow));
        }
        if let Err(error) = self.wait_for_end(slot, deadline) {
            let ended = !slot.state().is_outstanding();
            if ended {
                self.free_window(slot);
            } else {
                self.leave_window(slot);
            }
            return Err(Failure { error, request: None, ended });
        }
        let failed = matches!(slot.state(), State::Done(_)).then(|| self.failed_request(slot));
        match self.take_window_result(slot) {
            Ok(_) => Ok(slot.completion_pointer()),
            Err(error) => Err(Failure { error, request: failed, ended: true }),
        }
    }

    pub(super) fn take_window_result(&self, slot: &Slot) -> TransportResult<WorkSuccess> {
        let result = self.result(slot);
        self.free_window(slot);
        result
    }

    fn free_window(&self, slot: &Slot) {
        self.table.release_window(slot);
        self.update_fast_path();
    }

    /// The window is done.
    fn failed_request(&self, slot: &Slot) -> usize {
        let completion = slot.completion();
        member(completion.wr_id())
            .map_or_else(|| self.window_len(slot) - 1, |member| member.position)
    }

    fn window_len(&self, slot: &Slot) -> usize {
        let (mut len, mut other) = (usize::from(slot.run.get()), slot.next_ended.get());
        while let Some(slot) = self.table.slot(other as usize) {
            (len, other) = (len + 1, slot.next_ended.get());
        }
        len
    }

    /// A request has failed, or the handle was dropped.
    pub(super) fn end_window(&self, slot: &Slot, owner: Owner, completion: &WorkCompletion) {
        if owner == Owner::FailedWindow {
            slot.set_state(State::Done(owner));
            return;
        }
        self.unreported.unpolled.set(true);
        self.report_failure(completion);
        self.free_window(slot);
    }

    /// False if it is not a completion of a request before the last.
    pub(super) fn take_window_failure(&self, completion: &WorkCompletion) -> bool {
        let Some(member) = member(completion.wr_id()) else { return false };
        let Some(slot) = self.table.slot(member.place as usize) else { return false };
        let State::InFlight(owner) = slot.state() else { return false };
        if completion.queue_pair_number() != self.number
            || member.generation(slot.generation()) != slot.generation()
            || !owner.is_window()
            || member.position >= self.window_len(slot) - 1
        {
            return false;
        }
        match owner {
            // A success says nothing: the last one is to come.
            Owner::Window if !completion.is_success() => {
                slot.complete(owner, completion.as_raw());
                slot.set_state(State::InFlight(Owner::FailedWindow));
            }
            Owner::LostWindow => self.report_failure(completion),
            _ => {}
        }
        true
    }

    fn leave_window(&self, slot: &Slot) {
        match slot.state() {
            State::InFlight(owner) => {
                if owner == Owner::FailedWindow {
                    self.report_failure(&slot.completion());
                }
                slot.set_state(State::InFlight(Owner::LostWindow));
            }
            State::Done(_) => {
                self.unreported.unpolled.set(true);
                self.report_failure(&slot.completion());
                self.table.release_window(slot);
            }
            State::Discarded(_) => self.table.release_window(slot),
            State::Free | State::Abandoned | State::Seen => {}
        }
    }
}
