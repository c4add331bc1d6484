//! Flow control and keep-alives of a loop's channels.

use std::mem;
use std::time::{Duration, Instant};

use super::Loop;
use super::credit_waiters::Look;
use super::ended::ChannelId;
use super::post::queue_index;
use super::table::Table;
use crate::base::ffi;
use crate::channel::parts::{Core, Queue, check_reliable};
use crate::channel::{TransportError, TransportResult};
use crate::verbs::completion::WorkCompletion;

impl<B> Loop<'_, B> {
    /// The number of messages that the channel may send: see [`Channel::credits`](crate::Channel::credits).
    pub fn credits(&self, channel: ChannelId) -> Option<u32> {
        self.table.core(channel)?.available_credits()
    }

    /// A channel that may send again after [`NoCredit`](TransportError::NoCredit). It has credit for all messages of
    /// that post; or its peer could not be asked, and the next post reports why. Each channel is returned once.
    ///
    /// Polling sees the peer's answer, so call this after [`next_ended`](Self::next_ended) has returned `None`. A peer
    /// that had no new receives is asked again after a [pause](Self::credit_pause).
    pub fn next_credited(&mut self) -> Option<ChannelId> {
        let channel = self.table.credited()?;
        self.table.forget_credit(channel);
        Some(channel)
    }

    /// The longest time to sleep before the next call of [`next_credited`](Self::next_credited), which asks peers
    /// again. `None`: no pause is running, and a peer's answer makes the descriptor readable.
    pub fn credit_pause(&self) -> Option<Duration> {
        self.table.credit_pause()
    }

    /// `ibv_post_send`: writes 0 bytes to the peer if no send, write, read or atomic of the channel is in flight, or the last of
    /// them has [no completion](Self::post_unsignaled), which this one then returns: see
    /// [`Channel::keep_alive`](crate::Channel::keep_alive). If the peer is gone, everything in flight ends with errors,
    /// and the next call reports it.
    ///
    /// # Errors
    ///
    ///  - Those of [`Channel::keep_alive`](crate::Channel::keep_alive).
    ///  - [`NotConnected`](TransportError::NotConnected): the channel is not connected yet.
    ///  - [`Closed`](TransportError::Closed): it was removed.
    ///  - [`Verbs`](TransportError::Verbs): `EINVAL`: a [`LoopSender`](super::LoopSender) posts the channel's sends, and has none
    ///    in flight. The channel is well.
    #[doc(alias = "ibv_post_send")]
    pub fn keep_alive(&mut self, channel: ChannelId) -> TransportResult<()> {
        if !self.sign_of_life(channel)? {
            return Ok(());
        }
        let core = self.table.core(channel).ok_or(TransportError::Closed)?;
        let checked = core.check_device_if_due(Instant::now());
        if checked.is_err() {
            self.stop_and_reset(channel);
        }
        Ok(checked?)
    }

    /// As [`keep_alive`](Self::keep_alive), but returns true if something is in flight.
    pub(crate) fn sign_of_life(&mut self, channel: ChannelId) -> TransportResult<bool> {
        let core = self.table.core(channel).ok_or(TransportError::Closed)?;
        check_reliable(core)?;
        if let Some(error) = core.unreported.error.take() {
            return Err(error);
        }
        if self.sends_in_flight(channel) > 0 && self.table.covering(channel).is_none() {
            return Ok(true);
        }
        match self.probe(channel) {
            // Full of results that the program has not taken.
            Err(TransportError::QueueFull) => Ok(false),
            result => result.map(|()| false),
        }
    }

    fn probe(&mut self, channel: ChannelId) -> TransportResult<()> {
        let table = &mut self.table;
        let next = table.place(channel);
        let Some(at) = table.search(next) else {
            let entry = &table.entries[channel.index()];
            return Err(entry.why_full(&table.cold[channel.index()], Queue::Send));
        };
        let (returned, is_posted) = table.post_probe(channel, at);
        if is_posted {
            table.entries[channel.index()].next[queue_index(Queue::Send)] =
                table.slots[at as usize].next;
        }
        if returned == 0 {
            return Ok(());
        }
        let error = ffi::failed("ibv_post_send", returned);
        if is_posted {
            self.fail(channel, error.into());
        }
        Err(error.into())
    }
}

impl<B> Table<B> {
    /// Returns `None` if the channel was removed or is out of the loop.
    pub(super) fn core(&self, channel: ChannelId) -> Option<&Core> {
        self.entry(channel)?;
        self.cold[channel.index()].core.as_deref()
    }

    /// Returns false if no credit read is in flight.
    pub(super) fn take_credits(&mut self, channel: ChannelId, completion: &ffi::ibv_wc) -> bool {
        let is_taken = self.core(channel).is_some_and(|core| {
            core.credit_number() == Some(completion.wr_id)
                && core.take_credits(&WorkCompletion::from(*completion))
        });
        if is_taken && self.cold[channel.index()].lacks_credit > 0 {
            self.credit_waiters.answered(channel.index);
        }
        is_taken
    }

    /// Asks peers that have answered or whose pause is over.
    pub(super) fn credited(&mut self) -> Option<ChannelId> {
        let Self { credit_waiters, cold, .. } = self;
        let now = credit_waiters.next_pause().map(|(_, index)| match &cold[index as usize].core {
            Some(core) => core.credit_now(),
            None => Instant::now(),
        });
        let index = credit_waiters.next(now, |index| {
            let cold = &cold[index as usize];
            match &cold.core {
                _ if cold.lacks_credit == 0 => Look::Leave,
                Some(core)
                    if core.require_credits(cold.lacks_credit) == Err(TransportError::NoCredit) =>
                {
                    core.credit_ask_at().map_or(Look::Leave, Look::Pause)
                }
                _ => Look::Found,
            }
        })?;
        Some(ChannelId { index, generation: self.entries[index as usize].generation })
    }

    /// Returns true if a channel has credit; if a pause has begun since the wait chose its time-out, and `any_pause`;
    /// or if `until` has passed, which a wait that finds answers at each poll never checks.
    pub(super) fn must_wait_end(&mut self, any_pause: bool, until: Instant) -> bool {
        self.credit_waiters.any()
            && (self.credited().is_some()
                || any_pause && self.credit_pause().is_some()
                || Instant::now() >= until)
    }

    pub(super) fn credit_pause(&self) -> Option<Duration> {
        if self.credit_waiters.is_due() {
            return Some(Duration::ZERO);
        }
        let (at, index) = self.credit_waiters.next_pause()?;
        let core = self.cold[index as usize].core.as_deref();
        let now = core.map_or(at, Core::credit_now);
        Some(at.saturating_duration_since(now))
    }

    #[cold]
    #[inline(never)]
    pub(super) fn refuse_without_credit(
        &mut self,
        channel: ChannelId,
        messages: u32,
    ) -> TransportError {
        let required = self.core(channel).map(|core| core.require_credits(messages));
        match required {
            Some(Err(error)) if error != TransportError::NoCredit => return error,
            _ => {}
        }
        let cold = &mut self.cold[channel.index()];
        let ask_at = cold.core.as_deref().and_then(Core::credit_ask_at);
        self.credit_waiters.refused(channel.index, cold.lacks_credit == 0, ask_at);
        cold.lacks_credit = messages;
        TransportError::NoCredit
    }

    pub(super) fn forget_credit(&mut self, channel: ChannelId) {
        let cold = self.cold.get_mut(channel.index());
        if cold.is_some_and(|cold| mem::take(&mut cold.lacks_credit) > 0) {
            self.credit_waiters.forget(channel.index);
        }
    }
}
