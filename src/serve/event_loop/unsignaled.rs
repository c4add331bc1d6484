//! Sends without completions.
//!
//! The one after them has a completion, which ends them too. The slot after a send without completion is free, and kept for
//! one with a completion, so that there is always room for what ends them.

use super::Loop;
use super::ended::{ChannelId, LoopBuffer};
use super::post::queue_index;
use super::slots::{NEVER_FREE, ONE, State};
use super::table::Table;
use crate::base::ffi;
use crate::channel::parts::{Operation, Queue, Refused, Templates, nowhere};
use crate::channel::{OperationError, OwnedBuffer, WorkRequest};
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
    pub fn post_unsignaled<R: WorkRequest + SendQueueRequest>(
        &mut self,
        channel: ChannelId,
        request: R,
        token: u64,
    ) -> Result<(), OperationError<B>>
    where
        R::Kept: OwnedBuffer,
        B: LoopBuffer<R::Kept>,
    {
        let table = &mut self.table;
        let Some(entry) = table.entry(channel) else { return self.post(channel, request, token) };
        let covering = table.covering(channel);
        let at = if covering != NEVER_FREE { covering } else { entry.next[SEND] };
        let is_free = |slot: u32| table.slots[slot as usize].state == State::Free;
        let next = table.slots[at as usize].next;
        if next == at || !is_free(at) || !is_free(next) {
            return self.post(channel, request, token);
        }
        table.entries[channel.index()].next[SEND] = at;
        table.prepared.set_signaled(false);
        let posted = self.post_as(channel, request, State::Unsignaled, token);
        self.table.prepared.set_signaled(true);
        self.table.list_unsignaled(channel, at);
        posted.map(drop)
    }

    /// Posts a request that ends those without completions before it. Returns it if there are none.
    pub(super) fn post_covering<R: WorkRequest, E: From<Refused<R>>>(
        &mut self,
        channel: ChannelId,
        request: R,
        state: State,
        token: u64,
    ) -> Result<Result<u64, E>, R>
    where
        R::Kept: OwnedBuffer,
        B: LoopBuffer<R::Kept>,
    {
        let table = &mut self.table;
        let at = table.covering(channel);
        if R::Operation::QUEUE != Queue::Send || at == NEVER_FREE || state != State::Token {
            return Err(request);
        }
        table.entries[channel.index()].next[SEND] = at;
        table.cold[channel.index()].covering = NEVER_FREE;
        let posted = self.post_as(channel, request, State::Covers, token);
        self.table.list_unsignaled(channel, at);
        Ok(posted)
    }
}

impl<B> Table<B> {
    fn covering(&self, channel: ChannelId) -> u32 {
        let cold = &self.cold[channel.index()];
        if cold.core.is_some() && cold.stopped.is_none() { cold.covering } else { NEVER_FREE }
    }

    /// After a post at this slot: if it succeeded, it is in the list. The next one has a completion, as long as the last in the list
    /// has none.
    fn list_unsignaled(&mut self, channel: ChannelId, at: u32) {
        let Self { slots, cold, entries, .. } = self;
        let (cold, entry) = (&mut cold[channel.index()], &mut entries[channel.index()]);
        if slots[at as usize].state != State::Free {
            cold.unsignaled.push(slots, at);
        }
        let list = cold.unsignaled;
        let lacks = !list.is_empty() && slots[list.last as usize].state == State::Unsignaled;
        // A failed post may have closed the queue.
        let next = std::mem::replace(&mut cold.covering, NEVER_FREE).max(entry.next[SEND]);
        if lacks && cold.stopped.is_none() {
            (cold.covering, entry.next[SEND]) = (next, NEVER_FREE);
        }
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

    /// After the queue pair has been taken to ERR: a write of nothing, which is flushed behind sends without completions.
    pub(super) fn flush_unsignaled(&mut self, channel: ChannelId) {
        let at = std::mem::replace(&mut self.cold[channel.index()].covering, NEVER_FREE);
        if at == NEVER_FREE {
            return;
        }
        let (operation, _) = WriteWorkRequest::new((), nowhere()).split();
        let slot = &mut self.slots[at as usize];
        slot.number = slot.number.wrapping_add(ONE);
        let (target, templates) = (&self.entries[channel.index()].target, self.prepared.as_ptr());
        // SAFETY: the queue pair is live, since its core is in the loop, and the loop is borrowed exclusively. There is no buffer.
        let returned = unsafe { operation.post(target, templates, slot.number, &mut []) };
        // SAFETY: as above.
        if returned == 0 || unsafe { Templates::may_be_posted(templates, Queue::Send) } {
            slot.state = State::Probe;
            self.cold[channel.index()].unsignaled.push(&mut self.slots, at);
        }
    }
}
