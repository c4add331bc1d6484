//! Sends without completions.
//!
//! The one after them has a completion, which ends them too. The slot after a send without completion is free, and kept for
//! one with a completion, so that there is always room for what ends them. It is not stored: it follows the last in the list.

use std::ffi::c_int;

use super::Loop;
use super::ended::{ChannelId, LoopBuffer};
use super::post::queue_index;
use super::slots::{NEVER_FREE, ONE, Slot, State};
use super::table::Table;
use crate::base::ffi;
use crate::channel::parts::{Operation, Queue, Templates, nowhere};
use crate::channel::{OperationError, WorkRequest};
use crate::verbs::operation::sealed::Request as _;
use crate::verbs::operation::{SendQueueRequest, WriteWorkRequest};

const SEND: usize = queue_index(Queue::Send);

impl<B> Loop<'_, B> {
    /// `ibv_post_send`: as [`post`](Self::post), for a request whose success has no completion of its own, which spares the
    /// device and [`next_ended`](Self::next_ended) one: a program asks for every N-th, say, by `post`. `next_ended` returns it
    /// with the next one of the channel that has a completion, before that; its [result](super::Ended::result) is made of that
    /// completion. What fails has a completion in any case, and if the channel ends, all come back.
    ///
    /// The last free place of the queue is for a request with a completion: if there is only one, this posts as `post` does.
    ///
    /// # Errors
    ///
    /// Those of [`post`](Self::post).
    #[doc(alias = "IBV_SEND_SIGNALED")]
    pub fn post_unsignaled<R: WorkRequest<Kept: LoopBuffer<B>> + SendQueueRequest>(
        &mut self,
        channel: ChannelId,
        request: R,
        token: u64,
    ) -> Result<(), OperationError<B>> {
        let table = &self.table;
        if table.entry(channel).is_some() {
            let place = &table.slots[table.place(channel) as usize];
            let next = &table.slots[place.next as usize];
            let has_two = place.state == State::Free && next.state == State::Free;
            if has_two && !std::ptr::eq(place, next) {
                return self.post_as(channel, request, State::Unsignaled, token).map(drop);
            }
        }
        self.post(channel, request, token)
    }
}

impl<B> Table<B> {
    /// The free slot that is kept behind a send without completion. `None`: the last one listed has a completion.
    pub(super) fn covering(&self, channel: ChannelId) -> Option<u32> {
        let list = self.cold[channel.index()].unsignaled;
        let last = self.slots.get(list.last as usize).filter(|_| !list.is_empty())?;
        let is_kept = |next: u32| self.slots[next as usize].state == State::Free;
        Some(last.next).filter(|&next| last.state == State::Unsignaled && is_kept(next))
    }

    /// Where the channel's next send goes. `NEVER_FREE`: the queue is closed.
    pub(super) fn place(&self, channel: ChannelId) -> u32 {
        match self.entries[channel.index()].next[SEND] {
            NEVER_FREE => NEVER_FREE,
            next => self.covering(channel).unwrap_or(next),
        }
    }

    /// After a send without completion, the queue looks full to `post`, which then asks for the kept slot.
    pub(super) fn list_unsignaled(&mut self, index: u32) {
        let Slot { channel, state, .. } = self.slots[index as usize];
        if state == State::Unsignaled {
            self.entries[channel.index()].next[SEND] = index;
        }
        self.cold[channel.index()].unsignaled.push(&mut self.slots, index);
    }

    /// Ends the sends without completions before this one of the list.
    pub(super) fn end_covered(&mut self, index: u32, completion: &ffi::ibv_wc) {
        let channel = self.slots[index as usize].channel.index();
        let mut at = self.cold[channel].unsignaled.first;
        while at != index {
            let Some(slot) = self.slots.get(at as usize) else { return };
            at = slot.link;
        }
        // If it was flushed, nobody knows whether they were carried out.
        let status = match completion.status {
            ffi::ibv_wc_status::IBV_WC_WR_FLUSH_ERR => completion.status,
            _ => ffi::ibv_wc_status::IBV_WC_SUCCESS,
        };
        loop {
            let list = &mut self.cold[channel].unsignaled;
            let first = list.first;
            let slot = &self.slots[first as usize];
            let (number, is_covered) = (slot.number, slot.state == State::Unsignaled);
            list.first = slot.link;
            if first == index {
                return;
            }
            if is_covered {
                let ended = ffi::ibv_wc { wr_id: number, status, ..*completion };
                match status {
                    ffi::ibv_wc_status::IBV_WC_SUCCESS => self.finish(first, &ended),
                    _ => self.end_with_failure(first, ended),
                }
            }
        }
    }

    /// Posts a write of nothing behind sends without completions, if they are the last: they come back with it.
    pub(super) fn flush_unsignaled(&mut self, channel: ChannelId) {
        if let Some(at) = self.covering(channel) {
            self.post_probe(channel, at);
        }
    }

    /// Posts a write of nothing. Returns the errno value, and whether the device may have the request.
    pub(super) fn post_probe(&mut self, channel: ChannelId, at: u32) -> (c_int, bool) {
        let (operation, _) = WriteWorkRequest::new((), nowhere()).split();
        let slot = &mut self.slots[at as usize];
        slot.number = slot.number.wrapping_add(ONE);
        let (target, templates) = (&self.entries[channel.index()].target, self.prepared.as_ptr());
        // SAFETY: the queue pair is live, since its core is in the loop, and the loop is borrowed exclusively. There is no buffer.
        let returned = unsafe { operation.post(target, templates, slot.number, &mut []) };
        // SAFETY: as above.
        let is_posted =
            returned == 0 || unsafe { Templates::may_be_posted(templates, Queue::Send) };
        if is_posted {
            slot.state = State::Probe;
            self.list_unsignaled(at);
        }
        (returned, is_posted)
    }
}
