//! Windows: requests that are posted together and have one completion.
//!
//! A window is one operation with a place in the ring for each request. The first place's slot keeps it, under the last
//! request's number. The other slots stay free; a search skips them.

use super::Loop;
use super::ended::{ChannelId, LoopBuffer, STOPPED};
use super::slots::{NEVER_FREE, ONE, Outcome, Slot, State};
use super::table::Table;
use crate::base::error::Error;
use crate::base::ffi;
pub(crate) use crate::channel::parts::NO_CREDIT;
use crate::channel::parts::Queue;
use crate::channel::parts::Refused;
pub(crate) use crate::channel::parts::explain;
pub(crate) use crate::channel::parts::{LEADERS, Member, member, upper_half};
pub(crate) use crate::channel::parts::{NotPosted, WindowList};
use crate::channel::{PreparedWindow, WindowError};
use crate::channel::{TransportError, TransportResult};

enum Failure {
    /// The device has not seen the window.
    Refused(TransportError),
    /// The device has none of the window in this slot, or its first requests.
    NotPosted(u32, NotPosted),
}

impl<B> Loop<'_, B> {
    /// `ibv_post_send`: posts several requests together, with one doorbell and one completion.
    /// [`next_ended`](Self::next_ended) returns the window as one operation, with all its buffers. Its result is
    /// success, or the error of the [first](super::Ended::request) request that failed.
    ///
    /// The loop is one of windows that own their buffers (`Loop<PreparedWindow<[PooledBuffer; 16]>>`), or of
    /// [`AnyBuffer`](crate::channel::AnyBuffer)s. A window takes a place in the queue for each of its requests, all
    /// in a row.
    ///
    /// # Errors
    ///
    /// Those of [`post`](Self::post); [`request`](WindowError::request) is the one that was refused. If the device may
    /// have some of the requests, the error does not contain the window: `next_ended` returns it.
    #[doc(alias = "ibv_post_send")]
    #[inline(always)]
    pub fn post_window<C>(
        &mut self,
        channel: ChannelId,
        window: PreparedWindow<C>,
        token: u64,
    ) -> Result<(), WindowError<PreparedWindow<C>>>
    where
        B: LoopBuffer<PreparedWindow<C>>,
    {
        self.post_window_as(channel, window, State::Token, token).map(drop).map_err(Into::into)
    }

    /// Returns the window's number.
    #[inline(always)]
    pub(super) fn post_window_as<C>(
        &mut self,
        channel: ChannelId,
        mut window: PreparedWindow<C>,
        state: State,
        token: u64,
    ) -> Result<u64, Refused<PreparedWindow<C>>>
    where
        B: LoopBuffer<PreparedWindow<C>>,
    {
        // SAFETY: the window moves into the slot below, where it stays until the device is done; nothing in between
        // unwinds. Its buffers keep their memory until they are dropped: see `LoopBuffer`.
        let posted = unsafe { self.table.post_list(channel, window.list(), state, token) };
        let (at, failure) = match posted {
            Ok(at) => (at, None),
            Err(failure) => match self.window_failed(channel, window.list(), state, failure) {
                (error, index, Some(at)) => (at, Some((error, index))),
                (error, index, None) => {
                    return Err(Refused { error, request: Some(window), index });
                }
            },
        };
        // SAFETY: `post_list` and `window_failed` return indexes of slots.
        let slot = unsafe { self.table.slots.get_unchecked_mut(at as usize) };
        slot.buffer.write(B::keep(window));
        let Some((error, index)) = failure else { return Ok(slot.number) };
        self.fail(channel, error);
        if index.is_some() && !self.table.is_of_tasks {
            self.end_part(channel, at);
        }
        Err(Refused { error, request: None, index })
    }

    /// Ends a window of which the device has a part. The queue pair is in ERR. If that part was carried out before, no
    /// completion will tell: then this resets the queue pair.
    #[cold]
    #[inline(never)]
    fn end_part(&mut self, channel: ChannelId, at: u32) {
        self.table.settle_all(self.members.capacity);
        if self.table.slots[at as usize].state == State::PartOfWindow {
            self.stop(channel);
        }
    }

    /// Returns the slot if the device may have a part.
    #[cold]
    #[inline(never)]
    fn window_failed(
        &mut self,
        channel: ChannelId,
        list: &WindowList,
        state: State,
        failure: Failure,
    ) -> (TransportError, Option<usize>, Option<u32>) {
        let (index, failure) = match failure {
            Failure::Refused(error) => return (error, None, None),
            Failure::NotPosted(index, failure) => (index, failure),
        };
        if failure.returned == NO_CREDIT && list.takes_receives {
            let error = self.table.refuse_without_credit(channel, list.len() as u32);
            return (error, None, None);
        }
        let error = match failure.returned {
            libc::EDESTADDRREQ if self.members.datagrams.contains_key(&channel) => {
                explain("ibv_post_send", failure.returned)
            }
            _ => failure.error().into(),
        };
        let table = &mut self.table;
        if failure.posted == 0 {
            return (error, Some(0), None);
        }
        let request = (failure.posted < list.len()).then_some(failure.posted);
        let entry = &mut table.entries[channel.index()];
        let (slot, outcome) =
            (&mut table.slots[index as usize], &mut table.outcomes[index as usize]);
        // The future gets an error and no number.
        slot.state = if state == State::Task { State::Abandoned } else { state };
        outcome.run.generation = slot.generation();
        entry.next[0] = outcome.run.next;
        if request.is_some() {
            outcome.was = slot.state;
            slot.state = State::PartOfWindow;
            outcome.posted = failure.posted as u32;
            outcome.completion = ffi::ibv_wc { status: STOPPED, ..Default::default() };
        }
        (error, request, Some(index))
    }
}

impl<C> From<Refused<PreparedWindow<C>>> for WindowError<PreparedWindow<C>> {
    #[inline(always)]
    fn from(refused: Refused<PreparedWindow<C>>) -> Self {
        let Refused { error, request: buffers, index: request } = refused;
        Self { error, request, buffers }
    }
}

impl<B> Table<B> {
    /// Returns the slot for the window.
    ///
    /// # Safety
    ///
    /// The memory of the requests is valid, and exclusive where they write to it, until the operation has ended or
    /// [`window_failed`](Loop::window_failed) has said that the device has none of it.
    #[inline(always)]
    unsafe fn post_list(
        &mut self,
        channel: ChannelId,
        list: &mut WindowList,
        state: State,
        token: u64,
    ) -> Result<u32, Failure> {
        let Some(entry) = self.entry(channel) else {
            return Err(Failure::Refused(TransportError::Closed));
        };
        if let Err(error) = list.check(&entry.limits) {
            return Err(Failure::Refused(error));
        }
        let (index, places) = (entry.next[0], list.len() as u32);
        // SAFETY: `next` of an entry is always the index of a slot, and each slot has an outcome.
        let (slot, outcome) = unsafe { self.slot_and_outcome(index) };
        // The places of this slot's last window are free again: only another window can have taken one before this slot
        // is taken, and for that `find_places` invalidates this run.
        let is_again =
            slot.state == State::Free && slot.is_of(outcome.run) && outcome.run.places == places;
        if !is_again && let Err(error) = self.find_places(channel, places) {
            return Err(Failure::Refused(error));
        }
        // SAFETY: `entry` has found this channel above.
        let entry = unsafe { self.entries.get_unchecked_mut(channel.index()) };
        let (target, first) = (entry.target, entry.first_slot);
        // SAFETY: as for the same index above.
        let (slot, outcome) = unsafe { self.slot_and_outcome(index) };
        slot.number = slot.number.wrapping_add(ONE);
        slot.token = token;
        let generation = slot.generation();
        let upper = upper_half(index - first, generation);
        // SAFETY: the channel was not removed, so its queue pair is live. The caller vouches for the memory.
        let posted = unsafe { list.post(target, slot.number, upper) };
        if let Err(failure) = posted {
            return Err(Failure::NotPosted(index, failure));
        }
        slot.state = state;
        outcome.run.generation = generation;
        let next = outcome.run.next;
        // SAFETY: as above.
        unsafe { self.entries.get_unchecked_mut(channel.index()) }.next[0] = next;
        Ok(index)
    }

    /// # Safety
    ///
    /// `index` is that of a slot.
    #[inline(always)]
    unsafe fn slot_and_outcome(&mut self, index: u32) -> (&mut Slot<B>, &mut Outcome) {
        // SAFETY: the caller vouches for the index, and each slot has an outcome.
        unsafe {
            let slot = self.slots.get_unchecked_mut(index as usize);
            (slot, self.outcomes.get_unchecked_mut(index as usize))
        }
    }

    /// Notes the next `places` slots of the ring, if all are free.
    #[inline(never)]
    fn find_places(&mut self, channel: ChannelId, places: u32) -> TransportResult<()> {
        let Self { entries, asides, slots, outcomes, .. } = self;
        let entry = &entries[channel.index()];
        let from = entry.next[0];
        let full = || Err(entry.why_full(&asides[channel.index()], Queue::Send));
        if from == NEVER_FREE || from - entry.first_slot >= LEADERS {
            return full();
        }
        let depth = entry.depths[0];
        if places > depth {
            let what = "the requests of a window";
            let (count, most) = (places.into(), depth.into());
            return Err(Error::out_of_range("ibv_post_send", what, count, 1, most).into());
        }
        let mut index = from;
        for _ in 0..places {
            let slot = &slots[index as usize];
            if slot.state != State::Free {
                return full();
            }
            // This run is invalid now. The post sets the new generation.
            outcomes[index as usize].run.generation = slot.begun;
            index = slot.next;
        }
        let run = &mut outcomes[from as usize].run;
        (run.places, run.next) = (places, index);
        Ok(())
    }

    /// Handles a request that is not the last of its window. If the last one was not posted, the window ends with the
    /// last that was.
    ///
    /// # Errors
    ///
    /// There is no such request.
    #[cold]
    pub(super) fn end_member(&mut self, completion: &ffi::ibv_wc) -> TransportResult<()> {
        let &ffi::ibv_wc { wr_id, qp_num: queue_pair, status, .. } = completion;
        let unknown = Err(TransportError::UnknownCompletion { queue_pair, wr_id });
        let Some(member) = member(wr_id) else { return unknown };
        let Member { place, position, .. } = member;
        let its = self.numbers.get(queue_pair).filter(|&index| self.asides[index].core.is_some());
        let Some(index) = its else {
            // The channel was removed.
            return Ok(());
        };
        let entry = &self.entries[index];
        if place >= entry.depths[0] {
            return unknown;
        }
        let index = entry.first_slot + place;
        let channel = self.slots[index as usize].channel;
        let (slot, outcome) = (&mut self.slots[index as usize], &mut self.outcomes[index as usize]);
        let (reached, places) = (slot.generation(), slot.places(outcome.run) as usize);
        if slot.is_earlier(u64::from(member.generation(reached)) << 32) {
            return Ok(());
        }
        if member.generation(reached) != reached {
            return unknown;
        }
        let failed = status != ffi::ibv_wc_status::IBV_WC_SUCCESS;
        match slot.state {
            // A success before the last request means nothing yet.
            State::Token | State::Task | State::Abandoned if position + 1 < places && failed => {
                outcome.was = slot.state;
                slot.state = State::FailedWindow;
                outcome.completion = *completion;
                self.note_failure(channel);
            }
            State::Token | State::Task | State::Abandoned | State::FailedWindow
                if position + 1 < places => {}
            State::PartOfWindow if position + 1 == outcome.posted as usize => {
                let completion = outcome.completion;
                self.finish(index, &completion);
            }
            State::PartOfWindow if position < outcome.posted as usize => {}
            _ => return unknown,
        }
        Ok(())
    }
}
