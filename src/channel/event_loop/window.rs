//! Windows: several requests that are posted together, and have one completion.

use std::mem::ManuallyDrop;
use std::{array, mem};

use super::Loop;
use super::ended::{ChannelId, LoopBuffer, STOPPED};
use super::slots::{NEVER_FREE, ONE, Slot, State};
use super::table::Table;
use crate::channel::credits::NO_CREDIT;
use crate::channel::error::TransportError;
use crate::channel::generation::MAX_WINDOW;
use crate::channel::operation::Queue;
use crate::channel::operation::{Operation, Target};
use crate::channel::owned_buffer::OwnedBuffer;
use crate::channel::request::WorkRequest;
use crate::channel::slot::NO_SLOT;
use crate::channel::window::WindowError;
use crate::channel::window_list::{NotPosted, Window};
use crate::ffi;
use crate::memory::{GatherBuffer, PlainList};
use crate::operation::SendQueueRequest;
use crate::operation::sealed::Request;

impl<B> Loop<'_, B> {
    /// `ibv_post_send`: posts several requests of one kind together, with one doorbell and one completion, which is what
    /// most devices need the least time for.
    ///
    /// [`next_ended`](Self::next_ended) gives them back one by one, each with its buffer and this token, in their order:
    /// all when the last has completed; or if one fails, those up to that with its error, and the others with theirs.
    ///
    /// # Errors
    ///
    /// Those of [`post`](Self::post); [`request`](WindowError::request) is the one that was refused. All buffers come back
    /// if the device has seen no request. If it may have seen some, none comes back, and all end, with this token: see
    /// there.
    #[doc(alias = "ibv_post_send")]
    #[inline(always)]
    pub fn post_window<R, const N: usize>(
        &mut self,
        channel: ChannelId,
        requests: [R; N],
        token: u64,
    ) -> Result<(), WindowError<[B; N]>>
    where
        R: WorkRequest<Kept: OwnedBuffer>
            + SendQueueRequest
            + Request<Buffer: GatherBuffer<List: PlainList>>,
        B: LoopBuffer<R::Kept>,
    {
        const { assert!(N > 0 && N <= MAX_WINDOW, "a window has 1 to 32,767 requests") };
        let mut requests = requests.into_iter();
        let mut places = Places { last: NEVER_FREE, count: 0 };
        let filled = self.table.fill_window::<R, N>(channel, &mut requests, token, &mut places);
        let (target, window) = match filled {
            Ok(filled) => filled,
            Err(refusal) => return Err(self.table.take_back::<R, N>(refusal, requests, places)),
        };
        // SAFETY: all requests were set. The entry's channel was not removed, so its queue pair is live. The slots have the
        // buffers: see `post`.
        let posted = unsafe { window.post_numbered(target) };
        let table = &mut self.table;
        table.entries[channel.index()].next[0] = table.slots[places.last as usize].next;
        match posted {
            Ok(()) => Ok(()),
            Err(failure) => Err(self.not_posted::<R, N>(channel, failure, places)),
        }
    }

    /// The error of a window that was not posted, or not as a whole.
    #[cold]
    #[inline(never)]
    fn not_posted<R, const N: usize>(
        &mut self,
        channel: ChannelId,
        failure: NotPosted,
        places: Places,
    ) -> WindowError<[B; N]>
    where
        R: WorkRequest<Kept: OwnedBuffer>,
        B: LoopBuffer<R::Kept>,
    {
        let table = &mut self.table;
        let none = const { [const { None::<R> }; N] }.into_iter().flatten();
        if failure.returned == NO_CREDIT && R::Operation::TAKES_RECEIVE {
            let error = table.refuse_without_credit(channel, N as u32);
            return table.take_back((error, None, None), none, places);
        }
        let error = failure.error().into();
        if failure.posted == 0 {
            return table.take_back((error, Some(0), None), none, places);
        }
        // What was polled comes before what is put into the list now. If one is unknown, that is not what has failed here.
        let _ = table.settle_polled();
        let request = (failure.posted < N).then_some(failure.posted);
        if let Some(posted) = request {
            let first = table.slots[places.last as usize].first;
            let last = (1..posted).fold(first, |at, _| table.slots[at as usize].link);
            let last = &mut table.slots[last as usize];
            let mut next = mem::replace(&mut last.link, NO_SLOT);
            last.first = first;
            while next != NO_SLOT {
                let index = next;
                next = table.slots[index as usize].link;
                let completion = ffi::ibv_wc { status: STOPPED, ..Default::default() };
                table.finish(index, &completion);
            }
        }
        self.to_error(channel);
        WindowError { error, request, buffers: None }
    }
}

/// The slots of a window that is being filled.
struct Places {
    /// The last of them. Each is linked to the next, and the slot of nobody to the first.
    last: u32,
    count: usize,
}

/// Why a window was refused, which request is wrong, and the one that has no slot.
type Refusal<R> = (TransportError, Option<usize>, Option<R>);

impl<B> Table<B> {
    /// Writes a window's requests. Each gets a slot, with its buffer.
    #[inline(always)]
    fn fill_window<R, const N: usize>(
        &mut self,
        channel: ChannelId,
        requests: &mut array::IntoIter<R, N>,
        token: u64,
        places: &mut Places,
    ) -> Result<(Target, Window<'_>), Refusal<R>>
    where
        R: WorkRequest<Kept: OwnedBuffer>
            + SendQueueRequest
            + Request<Buffer: GatherBuffer<List: PlainList>>,
        B: LoopBuffer<R::Kept>,
    {
        let Some(entry) = self.entry(channel) else {
            return Err((TransportError::Closed, None, None));
        };
        let (target, limits, mut next) = (entry.target, entry.limits, entry.next[0]);
        // The slots of the ring that were not looked at.
        let mut left = entry.depths[0];
        if let Err(error) = self.window.reserve_shared(N, &limits) {
            return Err((error.into(), None, None));
        }
        let Self { window, slots, entries, asides, .. } = self;
        let mut window = window.begin(0);
        for request in requests {
            let index = loop {
                if left == 0 {
                    let (entry, aside) = (&entries[channel.index()], &asides[channel.index()]);
                    return Err((entry.why_full(aside, Queue::Send), None, Some(request)));
                }
                left -= 1;
                // SAFETY: it is the index of a slot, as all that are stored in entries and slots.
                let slot = unsafe { slots.get_unchecked(next as usize) };
                let index = mem::replace(&mut next, slot.next);
                if slot.state == State::Free {
                    break index;
                }
            };
            // SAFETY: as above.
            let slot = unsafe { slots.get_unchecked_mut(index as usize) };
            slot.number = slot.number.wrapping_add(ONE);
            let (operation, buffer) = request.split();
            // Nothing below drops it.
            let mut buffer = ManuallyDrop::new(buffer);
            // SAFETY: there is room for `N` requests.
            let added =
                unsafe { window.add_numbered::<R>(slot.number, &limits, &operation, &mut buffer) };
            let buffer = ManuallyDrop::into_inner(buffer);
            if let Err(error) = added {
                return Err((error, Some(places.count), Some(R::join(operation, buffer))));
            }
            slot.token = token;
            slot.state = State::Window;
            slot.buffer.write(B::keep(buffer.keep()));
            // SAFETY: as above.
            unsafe { slots.get_unchecked_mut(places.last as usize) }.link = index;
            places.last = index;
            places.count += 1;
        }
        let first = slots[NEVER_FREE as usize].link;
        let last = &mut slots[places.last as usize];
        (last.link, last.first) = (NO_SLOT, first);
        Ok((target, window))
    }

    /// The error of a window of which the device has seen nothing, with the buffers. `rest` are the requests behind the refused
    /// one.
    #[cold]
    #[inline(never)]
    fn take_back<R, const N: usize>(
        &mut self,
        (error, request, refused): Refusal<R>,
        rest: impl Iterator<Item = R>,
        places: Places,
    ) -> WindowError<[B; N]>
    where
        R: WorkRequest<Kept: OwnedBuffer>,
        B: LoopBuffer<R::Kept>,
    {
        let mut next = self.slots[NEVER_FREE as usize].link;
        let filled = (0..places.count).map(|_| {
            let slot = &mut self.slots[next as usize];
            next = slot.link;
            slot.state = State::Free;
            // SAFETY: the slot was filled, and is free now. The device has not seen its request.
            unsafe { slot.buffer.assume_init_read() }
        });
        let rest = refused.into_iter().chain(rest);
        let mut buffers = filled.chain(rest.map(|request| B::keep(request.split().1.keep())));
        let buffers = array::from_fn(|_| buffers.next().expect("each is in one of them"));
        WindowError { error, request, buffers: Some(buffers) }
    }

    /// The next operation of a window whose last request was carried out, and with it all before. This is its completion, which
    /// was taken from what was polled, and goes back there unless this is the last operation.
    #[inline(never)]
    pub(super) fn next_of_window(&mut self, completion: &ffi::ibv_wc) -> Option<&mut Slot<B>> {
        let index = completion.wr_id as u32;
        let last = self.slots.get(index as usize)?;
        let is_of_window = last.number == completion.wr_id
            && last.state == State::Window
            && last.queue_pair == completion.qp_num
            && last.link == NO_SLOT;
        if !is_of_window || completion.status != ffi::ibv_wc_status::IBV_WC_SUCCESS {
            return None;
        }
        let next = last.first;
        if next != index {
            // SAFETY: it was taken from the batch.
            unsafe { self.batch.put_back() };
            self.slots[index as usize].first = self.slots[next as usize].link;
        }
        self.slots.get_mut(next as usize)
    }

    /// Ends the operation in this slot, which is of a window, and those of the window before it: the device carries them
    /// out in order, and those would have completions if they had failed.
    pub(super) fn end_of_window(&mut self, index: u32, completion: &ffi::ibv_wc) {
        let mut last = index;
        while let Some(slot) = self.slots.get(self.slots[last as usize].link as usize) {
            last = slot.number as u32;
        }
        let rest = self.slots[index as usize].link;
        let mut next = self.slots[last as usize].first;
        while next != index {
            let slot = &self.slots[next as usize];
            let (ended, number) = (next, slot.number);
            next = slot.link;
            let status = ffi::ibv_wc_status::IBV_WC_SUCCESS;
            let completion = ffi::ibv_wc { wr_id: number, status, ..*completion };
            self.finish(ended, &completion);
        }
        if rest != NO_SLOT {
            self.slots[last as usize].first = rest;
        }
        self.finish(index, completion);
    }
}
