//! Senders: threads that post on a loop's channel beside the thread that polls.
//!
//! The sends of such a channel are in a [`Ring`] of its own. Senders put them in under their lock; the loop takes out what has
//! ended, without a lock. What ends in another way than by a successful completion moves to the loop's slot, and ends
//! there as any other operation.

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

use super::Loop;
use super::ended::{ChannelId, Ended, Failed, Keep as _, LoopBuffer};
use super::members::unknown;
use super::post::{checked_list, queue_index};
use super::ring::Ring;
use super::sends::{Posting, Sends};
use super::slots::{NEVER_FREE, State, index_of, no_memory};
use super::table::{Entry, Table};
use super::waking::LoopWaker;
use crate::base::{Error, Result, debug, ffi, sync::Mutex, trace::Hold};
use crate::channel::parts::{Operation, OwnTemplates, Queue};
use crate::channel::{OperationError, TransportError, WorkRequest};
use crate::verbs::memory::keep;
use crate::verbs::operation::SendQueueRequest;

/// Posts sends, writes, reads and atomics on one channel of a [`Loop`], from any thread, while another thread polls: see
/// [`Loop::channel_sender`].
///
/// Clones post on the same channel, one at a time: they share a lock, which the loop takes only when the channel ends. A
/// sender that is left when the loop is dropped posts nothing any more.
pub struct LoopSender<'res, B> {
    sends: Arc<Sends<B>>,
    /// So that a wait of the loop has something to wait for.
    waker: LoopWaker,
    /// A loop that is forgotten keeps its queue pairs, which need what they were made from.
    of: PhantomData<&'res ()>,
}

impl<B> LoopSender<'_, B> {
    /// `ibv_post_send`: posts any request but a receive, as [`Loop::post`] does. [`Loop::next_ended`] returns its buffer
    /// and `token` on the thread that polls.
    ///
    /// # Errors
    ///
    /// With the buffer, if the device has not seen the request:
    ///
    ///  - [`QueueFull`](TransportError::QueueFull): the queue has as many operations as the channel was built for. One
    ///    counts until `next_ended` has returned it.
    ///  - [`Closed`](TransportError::Closed): the channel was removed, or the loop dropped.
    ///  - [`Stopped`](TransportError::Stopped): the channel was [stopped](Loop::stop), or a post has failed that the device
    ///    may have. [`NotConnected`](TransportError::NotConnected): it was [taken out](Loop::take_out).
    ///  - [`Verbs`](TransportError::Verbs): those of [`Loop::post`].
    ///
    /// Without the buffer, if the device may have the request: all operations of the channel, including this one, end with
    /// errors.
    #[doc(alias = "ibv_post_send")]
    #[inline(always)]
    pub fn post<R>(&self, request: R, token: u64) -> Result<(), OperationError<B>>
    where
        R: WorkRequest<Kept: LoopBuffer<B>> + SendQueueRequest,
    {
        let sends = &*self.sends;
        let (operation, mut buffer) = request.split();
        let list = checked_list::<R>(&sends.core.settings.limits, &operation, &mut buffer);
        let buffer = keep(buffer).keep();
        let refused = |error, buffer| Err(OperationError { error, buffer: Some(buffer) });
        let mut list = match list {
            Ok(list) => list,
            Err(error) => return refused(error, buffer),
        };
        let mut posting = sends.lock();
        if let Some(error) = posting.ended {
            return refused(error, buffer);
        }
        // First, since the loop may have the completion before the post returns.
        // SAFETY: who has the lock puts something in.
        let number = match unsafe { sends.ring.put(posting.next, (token, buffer)) } {
            Ok(number) => number,
            Err((_, buffer)) => return refused(TransportError::QueueFull, buffer),
        };
        let templates = posting.templates.as_ptr();
        // SAFETY: the channel has not ended, so its queue pair is live, also during the call: ending it takes the lock. An
        // `OwnedBuffer` keeps its memory until it is dropped, in the ring, at the loop or by its program, when the device
        // is done. Bytes that are not kept were copied by the post.
        let returned = unsafe { operation.post(&sends.target, templates, number, list.as_mut()) };
        if returned != 0 {
            let failed = (R::Operation::VERB, returned);
            // A subscriber is told after the lock.
            let _events = Hold::new();
            let mut posting = posting;
            return Err(sends.post_failed(&mut posting, number, failed));
        }
        posting.next = if posting.next + 1 == sends.ring.len() { 0 } else { posting.next + 1 };
        Ok(())
    }
}

impl<B> Clone for LoopSender<'_, B> {
    fn clone(&self) -> Self {
        Self { sends: self.sends.clone(), waker: self.waker.clone(), of: PhantomData }
    }
}

debug! { impl[B] LoopSender<'_, B>, self, channel: self.sends.core.number, .. }

impl<'res, B> Loop<'res, B> {
    /// A handle by which any thread posts sends on the channel, while this loop polls. No sender waits for the loop, nor the
    /// loop for a sender: they share no lock but for the end of the channel. [`next_ended`](Self::next_ended) returns these
    /// operations as it does others; receives are posted on the loop as before, and sends on the loop no more. Later calls
    /// return handles of the same channel.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let rxe0 = ibverbs_software::Device::builder().name("rxe0").build().unwrap();
    /// # rxe0.register();
    /// use std::sync::Arc;
    /// use ibverbs::{AccessFlags, BufferPool, Loop, PooledBuffer, ProtectionDomain, ReceiveWorkRequest, SendWorkRequest};
    ///
    /// let domain = Arc::new(ProtectionDomain::new(ibverbs::open("rxe0")?)?);
    /// let pool = BufferPool::new(&domain, 64, 16, AccessFlags::empty())?;
    /// let mut poller = Loop::<PooledBuffer>::new(domain.context_parent(), 64)?;
    /// let prepared = poller.create_channel(&domain).build()?;
    /// # let peer = prepared.endpoint();
    /// let channel = poller.add(prepared.handshake(peer)?)?;
    /// # for _ in 0..4 { poller.post(channel, ReceiveWorkRequest::new(pool.take().unwrap()), 9)? }
    /// let sender = poller.channel_sender(channel)?;
    /// let threads = [1, 2, 3, 4].map(|token| {
    ///     let (sender, pool) = (sender.clone(), pool.clone());
    ///     std::thread::spawn(move || {
    ///         let message = pool.take_from(b"hello").unwrap().expect("a buffer is free");
    ///         sender.post(SendWorkRequest::new(message), token)
    ///     })
    /// });
    /// for _ in 0..8 {
    ///     let ended = poller.wait_ended()?; // four sends, and here their receives
    ///     ended.result()?;
    /// }
    /// # threads.map(|thread| thread.join().unwrap().unwrap());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the loop has no such channel (any more), it is not connected, it was stopped, or it has sends that
    ///    `next_ended` has not returned.
    ///  - `EOPNOTSUPP`: it has [flow control](crate::ChannelBuilder::flow_control), or it is a datagram end.
    ///  - Those of [`waker`](Self::waker).
    pub fn channel_sender(&mut self, channel: ChannelId) -> Result<LoopSender<'res, B>> {
        const VERB: &str = "ibv_post_send";
        let waker = self.waker()?;
        let is_end = self.members.is_end(channel);
        let table = &mut self.table;
        let &Entry { target, first_slot, depths: [sends, ..], .. } =
            table.entry(channel).ok_or_else(|| unknown(VERB))?;
        let index = channel.index();
        if let Some(Some(sends)) = table.senders.get(index) {
            return Ok(LoopSender { sends: sends.clone(), waker, of: PhantomData });
        }
        let reason = "the channel is not connected, or was stopped";
        let core = table.cold[index].core.as_ref().filter(|core| core.table.is_open());
        let core = core.ok_or_else(|| Error::invalid(VERB, reason))?.clone();
        Error::invalid_if(table.why_stopped(channel).is_some(), VERB, reason)?;
        if is_end || core.credits.is_some() {
            let reason = "datagram ends and channels with flow control post on their loop alone";
            return Err(Error::with_reason(VERB, libc::EOPNOTSUPP, reason));
        }
        let slots = first_slot as usize..(first_slot + sends) as usize;
        let is_busy = table.slots[slots.clone()].iter().any(|slot| slot.state != State::Free);
        let reason = "the channel has sends that next_ended has not returned";
        Error::invalid_if(is_busy, VERB, reason)?;
        let more = (index + 1).saturating_sub(table.senders.len());
        table.senders.try_reserve(more).map_err(|_| no_memory())?;
        let numbers = &table.slots[slots];
        let ring = Ring::new(numbers.iter().map(|slot| slot.number));
        let posting = Posting { templates: OwnTemplates::new(), next: 0, ended: None };
        let sends = Arc::new(Sends { core, target, ring, posting: Mutex::new(posting) });
        table.senders.resize(table.senders.len() + more, None);
        table.senders[index] = Some(sends.clone());
        table.cold[index].has_sender = true;
        table.entries[index].next[queue_index(Queue::Send)] = NEVER_FREE;
        Ok(LoopSender { sends, waker, of: PhantomData })
    }
}

impl<B> Table<B> {
    fn sends_of(&self, completion: &ffi::ibv_wc) -> Option<(ChannelId, &Sends<B>)> {
        let slot = self.slots.get(index_of(completion.wr_id) as usize)?;
        let sends = self.senders.get(slot.channel.index())?.as_deref()?;
        (slot.queue_pair == completion.qp_num).then_some((slot.channel, sends))
    }

    /// Takes a sender's operation that has succeeded.
    #[inline]
    pub(super) fn take_sent(&mut self, completion: &ffi::ibv_wc) -> Option<Ended<B>> {
        let (channel, sends) = self.sends_of(completion)?;
        let failed = Failed::of(completion);
        if failed != Failed::NOT {
            return None;
        }
        let (token, buffer) = sends.ring.take(completion.wr_id)?;
        sends.ring.free(completion.wr_id);
        Some(Ended { channel, token, buffer, failed, completion: *completion })
    }

    /// Moves a sender's operation to the loop's slot. Its place in the ring stays taken until [`free_sent`](Self::free_sent).
    pub(super) fn adopt_sent(&mut self, completion: &ffi::ibv_wc) {
        let number = completion.wr_id;
        if let Some((_, sends)) = self.sends_of(completion)
            && let Some(operation) = sends.ring.take(number)
        {
            self.adopt(number, operation);
        }
    }

    fn adopt(&mut self, number: u64, (token, buffer): (u64, B)) {
        let slot = &mut self.slots[index_of(number) as usize];
        (slot.number, slot.token, slot.state) = (number, token, State::Token);
        slot.buffer.write(buffer);
    }

    /// The slot is free again.
    pub(super) fn free_sent(&self, index: u32) {
        let slot = &self.slots[index as usize];
        if let Some(Some(sends)) = self.senders.get(slot.channel.index()) {
            sends.ring.free(slot.number);
        }
    }

    /// In flight of these slots, which are of one channel or of all.
    pub(super) fn sent_in_flight(&self, slots: &Range<u32>) -> usize {
        let ends = [slots.start, slots.end.wrapping_sub(1)];
        let channels = ends.map(|at| self.slots.get(at as usize).map(|slot| slot.channel.index()));
        let range = match channels {
            [Some(first), Some(last)] if first == last => first..first + 1,
            _ => 0..self.senders.len(),
        };
        let senders = self.senders.get(range).into_iter().flatten().flatten();
        let of_these = senders.filter(|sends| slots.contains(&sends.ring.first()));
        of_these.map(|sends| sends.ring.in_flight()).sum()
    }

    /// Refuses further posts of a channel's senders, and moves what is in flight to the loop's slots. It waits while one of
    /// them posts.
    pub(super) fn end_sender(&mut self, index: usize, error: TransportError) {
        let Some(sends) = self.senders.get_mut(index).and_then(Option::take) else { return };
        self.cold[index].has_sender = false;
        sends.lock().ended.get_or_insert(error);
        for (slot, number) in sends.ring.latest() {
            match sends.ring.take(number) {
                Some(operation) => self.adopt(number, operation),
                None => self.slots[slot].number = number,
            }
        }
    }
}
