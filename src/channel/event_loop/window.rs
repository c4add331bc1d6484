//! Windows: several requests that are posted together, and have one completion.

use std::mem::ManuallyDrop;

use super::Loop;
use super::ended::{ChannelId, LoopBuffer, STOPPED};
use super::slots::{ONE, State};
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
        // Nothing below drops the buffers.
        let mut requests = requests.map(|request| {
            let (operation, buffer) = request.split();
            (operation, ManuallyDrop::new(buffer))
        });
        let mut indexes = [NO_SLOT; N];
        let set = self.table.set_window::<R, N>(channel, &mut requests, &mut indexes);
        // SAFETY: all were set. The entry's channel was not removed, so its queue pair is live. The buffers go to their
        // slots next, with nothing in between that unwinds: see `post`.
        let posted = set.map(|(target, window)| unsafe { window.post_numbered(target) });
        let buffers = requests.map(|(_, buffer)| buffer);
        let posted = match posted {
            Ok(Err(failure)) if failure.returned == NO_CREDIT && R::Operation::TAKES_RECEIVE => {
                let error = self.table.refuse_without_credit(channel, N as u32);
                return Err(refused((error, None), buffers));
            }
            Ok(Err(failure)) if failure.posted == 0 => {
                return Err(refused((failure.error().into(), Some(0)), buffers));
            }
            Ok(posted) => posted,
            Err(error) => return Err(refused(error, buffers)),
        };
        let table = &mut self.table;
        let mut index = indexes[0];
        for (place, buffer) in buffers.into_iter().enumerate() {
            index = indexes[place];
            // SAFETY: it is the index of a slot.
            let slot = unsafe { table.slots.get_unchecked_mut(index as usize) };
            slot.token = token;
            slot.state = State::Window;
            slot.link = if place + 1 < N { indexes[place + 1] } else { NO_SLOT };
            slot.buffer.write(B::keep(ManuallyDrop::into_inner(buffer).keep()));
        }
        table.slots[index as usize].first = indexes[0];
        table.entries[channel.index as usize].next[0] = table.slots[index as usize].next;
        match posted {
            Ok(()) => Ok(()),
            Err(failure) => Err(self.window_failed(channel, &indexes, &failure)),
        }
    }

    /// The error of a window of which the device may have the requests before `posted`.
    #[cold]
    #[inline(never)]
    fn window_failed<const N: usize>(
        &mut self,
        channel: ChannelId,
        indexes: &[u32; N],
        failure: &NotPosted,
    ) -> WindowError<[B; N]> {
        let table = &mut self.table;
        // What was polled comes before what is put into the list now. If one is unknown, that is not what has failed here.
        let _ = table.settle_polled();
        let request = (failure.posted < N).then_some(failure.posted);
        if let Some(posted) = request {
            let last = indexes[posted - 1] as usize;
            table.slots[last].link = NO_SLOT;
            table.slots[last].first = indexes[0];
            for &index in &indexes[posted..] {
                let completion = ffi::ibv_wc { status: STOPPED, ..Default::default() };
                table.finish(index, &completion);
            }
        }
        self.to_error(channel);
        WindowError { error: failure.error().into(), request, buffers: None }
    }
}

/// The error of a window of which the device has seen nothing, with the buffers.
#[cold]
#[inline(never)]
fn refused<D, B, const N: usize>(
    (error, request): (TransportError, Option<usize>),
    buffers: [ManuallyDrop<D>; N],
) -> WindowError<[B; N]>
where
    D: GatherBuffer<Kept: OwnedBuffer>,
    B: LoopBuffer<D::Kept>,
{
    let buffers = Some(buffers.map(|buffer| B::keep(ManuallyDrop::into_inner(buffer).keep())));
    WindowError { error, request, buffers }
}

impl<B> Table<B> {
    /// Writes a window's requests, with a slot for each, which it gives numbers. The error says which request it is of.
    #[inline(always)]
    fn set_window<R, const N: usize>(
        &mut self,
        channel: ChannelId,
        requests: &mut [(R::Operation, ManuallyDrop<R::Buffer>); N],
        indexes: &mut [u32; N],
    ) -> Result<(Target, Window<'_>), (TransportError, Option<usize>)>
    where
        R: WorkRequest + SendQueueRequest + Request<Buffer: GatherBuffer<List: PlainList>>,
    {
        let Some(entry) = self.entry(channel) else { return Err((TransportError::Closed, None)) };
        let (target, limits, mut next) = (entry.target, entry.limits, entry.next[0]);
        // The slots of the ring that were not looked at.
        let mut left = entry.depths[0];
        if let Err(error) = self.window.reserve_shared(N, &limits) {
            return Err((error.into(), None));
        }
        let mut window = self.window.begin(0);
        for (place, (operation, buffer)) in requests.iter_mut().enumerate() {
            let slot = loop {
                if left == 0 {
                    return Err((
                        self.entries[channel.index()]
                            .why_full(&self.asides[channel.index()], Queue::Send),
                        None,
                    ));
                }
                left -= 1;
                indexes[place] = next;
                // SAFETY: it is the index of a slot, as all that are stored in entries and slots.
                let slot = unsafe { self.slots.get_unchecked_mut(next as usize) };
                next = slot.next;
                if slot.state == State::Free {
                    break slot;
                }
            };
            slot.number = slot.number.wrapping_add(ONE);
            // SAFETY: there is room for `N` requests.
            let added =
                unsafe { window.add_numbered::<R>(slot.number, &limits, operation, buffer) };
            if let Err(error) = added {
                return Err((error, Some(place)));
            }
        }
        Ok((target, window))
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
