//! Posting to a loop's channels.

use std::ffi::c_int;
use std::mem::ManuallyDrop;

use super::Loop;
use super::ended::{ChannelId, Keep, LoopBuffer};
use super::slots::{NEVER_FREE, ONE, State, index_of};
use super::table::{ColdState, Entry};
use crate::base::{Error, ffi};
use crate::channel::parts::{
    Limits, NO_CREDIT, Operation, Queue, Refused, Templates, explain, list_of,
};
use crate::channel::{OperationError, OwnedBuffer, TransportError, WorkRequest};
use crate::verbs::memory::{GatherBuffer, keep};

impl<B> Loop<'_, B> {
    /// `ibv_post_send`, `ibv_post_recv`: posts any request on a channel, which then owns the request's buffer. When the
    /// operation has ended, [`next_ended`](Self::next_ended) returns both the buffer and `token`, a number of your
    /// choice.
    ///
    /// An [`Inline`](crate::Inline) request copies its bytes and keeps `()`, so the loop is one of `()` or of
    /// [`AnyBuffer`](crate::channel::AnyBuffer)s.
    ///
    /// # Errors
    ///
    /// With the buffer, if the device has not seen the request:
    ///
    ///  - [`QueueFull`](TransportError::QueueFull): the queue has as many operations as the channel was built for. An
    ///    operation counts until `next_ended` has returned it.
    ///  - [`NotConnected`](TransportError::NotConnected): before the [handshake](Self::handshake) only receives can be
    ///    posted, and nothing while the channel is [taken out](Self::take_out).
    ///  - [`NoCredit`](TransportError::NoCredit): the channel has [flow control](crate::ChannelBuilder::flow_control),
    ///    and the peer has no receive for the message. [`next_credited`](Self::next_credited) returns the channel when
    ///    it has.
    ///  - [`Closed`](TransportError::Closed): the channel was removed.
    ///  - [`Verbs`](TransportError::Verbs): `EINVAL`: the request is not possible, or it is a send on
    ///    [shared receives](Self::add_shared_receives); or the provider's errno value.
    ///  - [`Verbs`](TransportError::Verbs): in debug builds, memory of another protection domain or device. Release
    ///    builds do not look: there the operation ends with an error.
    ///
    /// Without the buffer, if the device may have the request:
    ///
    ///  - [`Verbs`](TransportError::Verbs): the post has failed. It counts as posted, and all operations of the
    ///    channel, including this one, end with errors.
    #[doc(alias = "ibv_post_send")]
    #[doc(alias = "ibv_post_recv")]
    #[inline(always)]
    pub fn post<R: WorkRequest<Kept: LoopBuffer<B>>>(
        &mut self,
        channel: ChannelId,
        request: R,
        token: u64,
    ) -> Result<(), OperationError<B>> {
        self.post_as(channel, request, State::Token, token).map(drop)
    }

    /// Returns the operation's number.
    #[inline(always)]
    pub(super) fn post_as<R: WorkRequest<Kept: LoopBuffer<B>>, E: From<Refused<R>>>(
        &mut self,
        channel: ChannelId,
        request: R,
        state: State,
        token: u64,
    ) -> Result<u64, E> {
        let (operation, buffer) = request.split();
        // Each path below moves it on.
        let mut buffer = ManuallyDrop::new(buffer);
        let table = &mut self.table;
        // The state is a constant. A caller that passes one of these two has found the channel.
        let is_listed = matches!(state, State::Unsignaled | State::Covers);
        let place = is_listed.then(|| table.place(channel));
        let entry = table.entries.get_mut(channel.index as usize);
        let Some(entry) = entry.filter(|entry| entry.generation == channel.generation) else {
            return Err(refused::<R, E>(TransportError::Closed, operation, buffer));
        };
        let queue = const { queue_index(R::Operation::QUEUE) };
        let index = place.unwrap_or(entry.next[queue]) as usize;
        // SAFETY: `next` of an entry is always the index of a slot, and so is a place.
        let slot = unsafe { table.slots.as_mut_ptr().add(index) };
        // SAFETY: as above, and nothing else accesses the slot: the loop is borrowed exclusively.
        if unsafe { (*slot).state } != State::Free {
            let request = R::join(operation, ManuallyDrop::into_inner(buffer));
            return self.post_elsewhere(channel, request, state, token);
        }
        // Made earlier, it would live across a call.
        let mut list = match checked_list::<R>(&entry.limits, &operation, &mut buffer) {
            Ok(list) => list,
            Err(error) => return Err(refused::<R, E>(error, operation, buffer)),
        };
        if const { is_received_list::<R>() } {
            // Unless a message comes, nothing has.
            buffer.received(0);
            table.received = Some(<R::Kept as Keep<B>>::received);
            table.slots[index].was = state;
        }
        // SAFETY: the entry and the slot exist, as found above, and no other reference to the slot does.
        let (entry, slot) =
            unsafe { (table.entries.get_unchecked_mut(channel.index as usize), &mut *slot) };
        let number = slot.number.wrapping_add(ONE);
        let kept = buffer.kept_length();
        if state == State::Unsignaled {
            table.prepared.set_signaled(false);
        }
        // SAFETY: the channel was not removed, so its queue pair is live. The loop owns the prepared requests, and is
        // borrowed exclusively. An `OwnedBuffer` keeps its memory until it is dropped. It moves into the slot below,
        // where it stays until the device is done; nothing in between unwinds. Bytes that are not kept were copied by
        // the post.
        let returned = unsafe {
            operation.post(&entry.target, table.prepared.as_ptr(), number, list.as_mut())
        };
        if state == State::Unsignaled {
            table.prepared.set_signaled(true);
        }
        // Even after a refusal, so that the next request has another number.
        slot.number = number;
        slot.token = token;
        if R::Operation::QUEUE == Queue::Receive {
            slot.kept = kept;
        }
        if returned != 0 {
            return Err(self.post_failed::<R, E>(number, state, returned, operation, buffer));
        }
        entry.next[queue] = slot.next;
        slot.state = in_flight::<R>(state);
        slot.buffer.write(keep(ManuallyDrop::into_inner(buffer)).keep());
        if is_listed {
            table.list_unsignaled(index as u32);
        }
        Ok(number)
    }

    #[cold]
    #[inline(never)]
    fn post_elsewhere<R: WorkRequest<Kept: LoopBuffer<B>>, E: From<Refused<R>>>(
        &mut self,
        channel: ChannelId,
        request: R,
        state: State,
        token: u64,
    ) -> Result<u64, E> {
        let queue = const { queue_index(R::Operation::QUEUE) };
        let table = &mut self.table;
        let may_cover = R::Operation::QUEUE == Queue::Send && state == State::Token;
        if may_cover && table.covering(channel).is_some() {
            return self.post_as(channel, request, State::Covers, token);
        }
        if let Some(free) = table.search(table.entries[channel.index()].next[queue]) {
            table.entries[channel.index()].next[queue] = free;
            return self.post_as(channel, request, state, token);
        }
        let (operation, buffer) = request.split();
        let mut buffer = ManuallyDrop::new(buffer);
        // The request's own errors come first.
        let limits = &table.entries[channel.index()].limits;
        if let Err(error) = checked_list::<R>(limits, &operation, &mut buffer) {
            return Err(refused::<R, E>(error, operation, buffer));
        }
        if R::Operation::QUEUE == Queue::Receive {
            let whole = ManuallyDrop::into_inner(buffer);
            match self.keep_unposted::<R>(channel, state, token, whole) {
                Ok(number) => return Ok(number),
                Err(whole) => buffer = ManuallyDrop::new(whole),
            }
        }
        let table = &self.table;
        let cold = &table.cold[channel.index()];
        let error = table.entries[channel.index()].why_full(cold, R::Operation::QUEUE);
        Err(refused::<R, E>(error, operation, buffer))
    }

    /// Returns the error of a failed post. The slot of its number is still free.
    #[cold]
    #[inline(never)]
    fn post_failed<R: WorkRequest<Kept: LoopBuffer<B>>, E: From<Refused<R>>>(
        &mut self,
        number: u64,
        state: State,
        returned: c_int,
        operation: R::Operation,
        buffer: ManuallyDrop<R::Buffer>,
    ) -> E {
        let index = index_of(number) as usize;
        // Read here: living across the post would cost a move to the stack.
        let channel = self.table.slots[index].channel;
        if returned == NO_CREDIT && R::Operation::TAKES_RECEIVE {
            return refused::<R, E>(
                self.table.refuse_without_credit(channel, 1),
                operation,
                buffer,
            );
        }
        let error = match self.members.is_end(channel) {
            true => explain(R::Operation::VERB, returned),
            false => ffi::failed(R::Operation::VERB, returned).into(),
        };
        let prepared = self.table.prepared.as_ptr();
        // SAFETY: the loop owns the prepared requests, and is borrowed exclusively.
        if !unsafe { Templates::may_be_posted(prepared, R::Operation::QUEUE) } {
            return refused::<R, E>(error, operation, buffer);
        }
        let slot = &mut self.table.slots[index];
        // The future gets an error and no number.
        let is_of_task = matches!(state, State::Task | State::Message);
        slot.state = if is_of_task { State::Abandoned } else { in_flight::<R>(state) };
        slot.buffer.write(keep(ManuallyDrop::into_inner(buffer)).keep());
        if matches!(state, State::Unsignaled | State::Covers) {
            self.table.list_unsignaled(index as u32);
        }
        self.fail(channel, error);
        Refused::new(error, None).into()
    }

    /// Ends all operations of the channel, since the device may have the request of a failed post.
    #[cold]
    pub(super) fn fail(&mut self, channel: ChannelId, error: TransportError) {
        if self.table.is_of_tasks && self.table.core(channel).is_some() {
            self.table.refuse(channel, error);
            if self.table.deferred.fail(channel, Some(error)) {
                return;
            }
        }
        self.move_to_error(channel);
    }
}

pub(super) const fn queue_index(queue: Queue) -> usize {
    match queue {
        Queue::Send => 0,
        Queue::Receive => 1,
    }
}

/// A loop tells the pieces of such a list what they have received.
const fn is_received_list<R: WorkRequest<Kept: OwnedBuffer>>() -> bool {
    matches!(R::Operation::QUEUE, Queue::Receive) && <R::Kept as OwnedBuffer>::IS_LIST
}

#[inline(always)]
fn in_flight<R: WorkRequest<Kept: OwnedBuffer>>(state: State) -> State {
    if const { is_received_list::<R>() } { State::List } else { state }
}

#[inline(always)]
pub(super) fn checked_list<R: WorkRequest>(
    limits: &Limits,
    operation: &R::Operation,
    buffer: &mut R::Buffer,
) -> Result<<R::Buffer as GatherBuffer>::List, TransportError> {
    let mut list = list_of::<R>(limits, buffer)?;
    operation.check(limits, list.as_mut())?;
    Ok(list)
}

#[cold]
#[inline(never)]
fn refused<R: WorkRequest, E: From<Refused<R>>>(
    error: TransportError,
    operation: R::Operation,
    buffer: ManuallyDrop<R::Buffer>,
) -> E {
    Refused::new(error, Some(R::join(operation, ManuallyDrop::into_inner(buffer)))).into()
}

impl<R: WorkRequest<Kept: LoopBuffer<B>>, B> From<Refused<R>> for OperationError<B> {
    #[cold]
    fn from(refused: Refused<R>) -> Self {
        let buffer = refused.request.map(|request| keep(request.split().1).keep());
        Self { error: refused.error, buffer }
    }
}

impl Entry {
    #[cold]
    #[inline(never)]
    pub(super) fn why_full(&self, cold: &ColdState, queue: Queue) -> TransportError {
        if let Some(error) = cold.stopped {
            return error;
        }
        if queue == Queue::Send && cold.has_sender {
            return Error::invalid("ibv_post_send", "a LoopSender posts the channel's sends")
                .into();
        }
        // An open channel whose queue has no slots is full, not closed.
        let is_closed = self.next[queue_index(queue)] == NEVER_FREE && !cold.flushes();
        if is_closed && self.first_of(queue) != NEVER_FREE {
            TransportError::NotConnected
        } else if queue == Queue::Send && cold.is_shared {
            let reason =
                "shared receives send nothing: post to one of the channels that share them";
            Error::invalid("ibv_post_send", reason).into()
        } else if queue == Queue::Receive && cold.shares {
            TransportError::ReceivesAreShared
        } else {
            TransportError::QueueFull
        }
    }
}
