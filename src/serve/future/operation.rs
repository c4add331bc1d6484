//! An operation of the send queue, as a future.

use std::future::Future;
use std::mem;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use super::AsyncChannel;
use super::locked_loop::{Guard, Lock, Share, State, release_quietly};
use super::request::AsyncRequest;
use super::stall_warning::Waits;
use crate::base::{debug, panics::catch};
use crate::channel::parts::{Queue, Refused};
use crate::channel::{OperationError, OwnedResult, TransportError, TransportResult};
use crate::serve::event_loop::{ChannelId, Ended};

/// An operation of an [`AsyncChannel`]: see [`run`](AsyncChannel::run) and [`submit`](AsyncChannel::submit).
///
/// Dropped before it is posted, it gives the buffer up and sends nothing. Dropped later, it discards only the result:
/// the operation goes on, and the loop drops the buffer when the device is done with it.
#[must_use = "futures do nothing unless polled"]
pub struct AsyncOperation<'a, R, S: Share> {
    channel: &'a AsyncChannel<S>,
    request: Option<R>,
    stage: Stage,
    waits: Waits,
}

#[derive(Clone, Copy, Debug)]
enum Stage {
    New,
    /// Its place in the line.
    InLine(u32),
    Posted(u64),
    Over,
}

impl<R, S: Share> Unpin for AsyncOperation<'_, R, S> {}

impl<'a, R: AsyncRequest<S::Buffer>, S: Share> AsyncOperation<'a, R, S> {
    #[inline(always)]
    pub(super) fn new(channel: &'a AsyncChannel<S>, request: R) -> Self {
        Self { channel, request: Some(request), stage: Stage::New, waits: Waits::default() }
    }

    #[inline(always)]
    pub(super) fn submit(channel: &'a AsyncChannel<S>, request: R) -> OwnedResult<S::Buffer, Self> {
        let mut guard = channel.share.lock();
        match post(&mut guard, channel.id, request, None, &mut None) {
            Ok(number) => {
                let waits = guard.stall_warning.wait();
                guard.unlock();
                Ok(Self { channel, request: None, stage: Stage::Posted(number), waits })
            }
            Err(refused) => {
                drop(guard);
                Err(R::refused(refused))
            }
        }
    }

    #[inline(never)]
    fn take(&mut self, number: u64, waker: &Waker) -> Poll<OwnedResult<S::Buffer>> {
        let mut state = self.channel.share.lock_briefly();
        if state.core.is_success(number) {
            self.stage = Stage::Over;
            self.waits = Waits::default();
            return Poll::Ready(Ok(state.core.take_success(number)));
        }
        self.take_slowly(state.until_done(&self.channel.share), number, waker)
    }

    #[inline(never)]
    fn take_slowly(
        &mut self,
        mut guard: Guard<'a, S>,
        number: u64,
        waker: &Waker,
    ) -> Poll<OwnedResult<S::Buffer>> {
        let AsyncChannel { share, id, .. } = self.channel;
        let (mut new, mut old) = (None, None);
        let place = guard.core.waker_of(number).and_then(|place| place.as_ref());
        let is_same = place.is_some_and(|own| own.will_wake(waker));
        if !is_same && !guard.core.is_done(number) {
            drop(guard);
            new = Some(waker.clone());
            guard = share.lock();
        }
        let done = guard.core.take_done(number);
        let stopped = guard.core.why_stopped(*id);
        let place = guard.core.waker_of(number).filter(|_| stopped.is_none());
        let polled = match (done, place) {
            (Some(done), _) => Poll::Ready(result_of(done, stopped)),
            (None, Some(place)) => {
                if new.is_some() {
                    mem::swap(place, &mut new);
                }
                Poll::Pending
            }
            // The device may still use the buffer, and nothing would end the operation.
            (None, None) => {
                old = guard.core.abandon(number).1;
                Poll::Ready(Err(stopped.unwrap_or(TransportError::UnknownWork).into()))
            }
        };
        if polled.is_ready() {
            self.stage = Stage::Over;
            self.waits = Waits::default();
        }
        drop(guard);
        drop((new, old));
        polled
    }

    #[inline(never)]
    fn post(&mut self, waker: &Waker) -> Poll<OwnedResult<S::Buffer>> {
        let Some(request) = self.request.take() else {
            return Poll::Ready(Err(TransportError::UnknownWork.into()));
        };
        let mut waker = Some(waker.clone());
        let AsyncChannel { share, id, .. } = self.channel;
        let mut state = share.lock_briefly();
        match post(&mut state, *id, request, None, &mut waker) {
            Ok(number) => {
                self.waits = state.stall_warning.wait();
                self.stage = Stage::Posted(number);
                Poll::Pending
            }
            Err(refused) => self.refused(state.until_done(share), None, refused, waker),
        }
    }

    #[cold]
    #[inline(never)]
    fn post_from_line(&mut self, place: u32, waker: &Waker) -> Poll<OwnedResult<S::Buffer>> {
        let Some(request) = self.request.take() else {
            return Poll::Ready(Err(TransportError::UnknownWork.into()));
        };
        let mut waker = Some(waker.clone());
        let mut guard = self.channel.share.lock();
        match post(&mut guard, self.channel.id, request, Some(place), &mut waker) {
            Ok(number) => {
                self.stage = Stage::Posted(number);
                self.leave_line(guard, place);
                Poll::Pending
            }
            Err(refused) => self.refused(guard, Some(place), refused, waker),
        }
    }

    /// There may be room for another operation.
    #[cold]
    fn leave_line(&self, mut guard: Guard<'_, S>, place: u32) {
        let waker = guard.core.leave_line(self.channel.id, Queue::Send, place);
        guard.core.wake_line(self.channel.id, Queue::Send);
        drop(guard);
        drop(waker);
    }

    #[cold]
    #[inline(never)]
    fn refused(
        &mut self,
        mut guard: Guard<'_, S>,
        place: Option<u32>,
        refused: Refused<R>,
        mut waker: Option<Waker>,
    ) -> Poll<OwnedResult<S::Buffer>> {
        let id = &self.channel.id;
        let waits = match refused.error {
            TransportError::QueueFull => guard.core.has_queue(*id, Queue::Send),
            TransportError::NoCredit => true,
            _ => false,
        };
        // Nothing would wake it on a stopped channel.
        let stopped = guard.core.why_stopped(*id).filter(|_| waits);
        let (waits, error) = (waits && stopped.is_none(), stopped.unwrap_or(refused.error));
        let joined = match place {
            _ if !waits => Err(error),
            Some(place) => {
                mem::swap(guard.core.waker_in_line(place), &mut waker);
                Ok(place)
            }
            None => guard.core.join_line(*id, Queue::Send, &mut waker),
        };
        match joined {
            Ok(place) => {
                self.request = refused.request;
                self.stage = Stage::InLine(place);
                if error == TransportError::NoCredit {
                    guard.set_credit_alarm();
                }
                drop(guard);
                drop(waker);
                Poll::Pending
            }
            Err(error) => {
                let own = place.map(|place| guard.core.leave_line(*id, Queue::Send, place));
                guard.core.wake_line(*id, Queue::Send);
                self.stage = Stage::Over;
                drop(guard);
                drop((own, waker));
                Poll::Ready(Err(R::refused(Refused { error, ..refused })))
            }
        }
    }
}

#[inline(always)]
fn post<B, R: AsyncRequest<B>>(
    state: &mut State<B>,
    channel: ChannelId,
    request: R,
    place: Option<u32>,
    waker: &mut Option<Waker>,
) -> Result<u64, Refused<R>> {
    let is_next = match place {
        Some(place) => state.core.is_first_in_line(place),
        None => state.core.is_line_empty(channel, Queue::Send),
    };
    if !is_next {
        return Err(Refused::new(TransportError::QueueFull, Some(request)));
    }
    request.post(&mut state.core, channel, waker)
}

#[inline(never)]
pub(super) fn result_of<B>(ended: Ended<B>, stopped: Option<TransportError>) -> OwnedResult<B> {
    let error = match ended.result() {
        Ok(success) => return Ok((ended.buffer, success)),
        Err(TransportError::Stopped) => stopped.unwrap_or(TransportError::Stopped),
        Err(error) => error,
    };
    Err(OperationError { error, buffer: Some(ended.buffer) })
}

impl<R: AsyncRequest<S::Buffer>, S: Share> Future for AsyncOperation<'_, R, S> {
    type Output = OwnedResult<S::Buffer>;

    // Not inlined into tasks, where the compiler would take results apart and rebuild them.
    #[inline(always)]
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match self.stage {
            Stage::Posted(number) => self.take(number, cx.waker()),
            Stage::New | Stage::Over => self.post(cx.waker()),
            Stage::InLine(place) => self.post_from_line(place, cx.waker()),
        }
    }
}

impl<R, S: Share> Drop for AsyncOperation<'_, R, S> {
    #[inline(always)]
    fn drop(&mut self) {
        if matches!(self.stage, Stage::InLine(_) | Stage::Posted(_)) {
            give_up(self.channel, self.stage);
        }
    }
}

#[cold]
#[inline(never)]
fn give_up<S: Share>(channel: &AsyncChannel<S>, stage: Stage) {
    let mut guard = channel.share.lock();
    guard.note_given_up();
    let (done, waker) = match stage {
        Stage::Posted(number) => guard.core.abandon(number),
        Stage::InLine(place) => {
            let waker = guard.core.leave_line(channel.id, Queue::Send, place);
            // The next in line takes the room that it may have been woken for.
            guard.core.wake_line(channel.id, Queue::Send);
            (None, waker)
        }
        Stage::New | Stage::Over => (None, None),
    };
    release_quietly(guard);
    let _ = catch(|| drop((done, waker)));
}

debug! { impl[R, S: Share] AsyncOperation<'_, R, S>, self, stage: self.stage, .. }

/// Given up on drop.
pub(super) struct InLine<'a, S: Share> {
    channel: &'a AsyncChannel<S>,
    queue: Queue,
    place: Option<u32>,
}

impl<'a, S: Share> InLine<'a, S> {
    pub(super) fn new(channel: &'a AsyncChannel<S>, queue: Queue) -> Self {
        Self { channel, queue, place: None }
    }

    /// # Errors
    ///
    ///  - `ENOMEM`: there is no memory for its place.
    pub(super) fn wait(&mut self, mut guard: Guard<'_, S>, waker: Waker) -> TransportResult<()> {
        let mut waker = Some(waker);
        let joined = match self.place {
            Some(place) => {
                mem::swap(guard.core.waker_in_line(place), &mut waker);
                Ok(())
            }
            None => {
                let joined = guard.core.join_line(self.channel.id, self.queue, &mut waker);
                joined.map(|place| self.place = Some(place))
            }
        };
        drop(guard);
        drop(waker);
        joined
    }
}

impl<S: Share> Drop for InLine<'_, S> {
    fn drop(&mut self) {
        let Some(place) = self.place else { return };
        let AsyncChannel { share, id, .. } = self.channel;
        let mut guard = share.lock();
        let waker = guard.core.leave_line(*id, self.queue, place);
        // The next in line takes what it may have been woken for.
        match self.queue {
            Queue::Receive => guard.core.wake_receiver(*id),
            Queue::Send => guard.core.wake_line(*id, Queue::Send),
        }
        release_quietly(guard);
        let _ = catch(|| drop(waker));
    }
}
