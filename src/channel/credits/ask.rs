//! How a channel with flow control posts, asks the peer for credits, and waits for them.

use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use std::{hint, ptr, thread};

use super::super::Channel;
use super::super::core::Core;
use super::super::error::{TransportError, TransportResult};
use super::super::operation::{Queue, Target};
use super::super::scope::Scope;
use super::super::slot::ONE;
use super::super::wait::Wait;
use super::{Credits, NO_CREDIT, decode};
use crate::base::{Error, ErrorKind, Result, ffi};
use crate::verbs::completion::WorkCompletion;
use crate::verbs::operation::destination::rdma;
use crate::verbs::operation::takes_receive;

impl Core {
    /// Makes posts count credits, with the core as first argument. Without flow control, they pay nothing.
    pub(in crate::channel) fn count_credits(self: &Arc<Self>) {
        if self.credits.is_some() {
            let this = Arc::as_ptr(self).cast_mut().cast();
            self.target.set(Target::with(this, post_send, post_recv));
        }
    }

    /// Returns false if no credit read is in flight.
    #[cold]
    pub(crate) fn take_credits(&self, completion: &WorkCompletion) -> bool {
        let Some(credits) = &self.credits else { return false };
        if !credits.reading.replace(false) {
            return false;
        }
        match completion.result() {
            Ok(_) => {
                // SAFETY: the caller of `Core::new` guarantees that the words are valid.
                let word = unsafe { &*credits.words.answer }.load(Ordering::Acquire);
                let before = credits.available();
                if let Some(count) = decode(word) {
                    credits.granted.set(count);
                }
                let now = credits.available();
                credits.most.set(credits.most.get().max(now));
                credits.note_answer(now > before);
            }
            Err(error) => credits.failed.set(Some(error)),
        }
        true
    }

    /// Does nothing while a read is in flight or a pause is running.
    ///
    /// # Errors
    ///
    /// The verb's. The device may have the read nevertheless, into the channel's own buffer.
    fn read_credits(&self, credits: &Credits) -> Result<()> {
        const VERB: &str = "ibv_post_send";

        if credits.reading.get() || credits.pause().is_some() {
            return Ok(());
        }
        let Some(remote) = credits.peer.get() else {
            return Err(Error::invalid(VERB, "the peer's credit word is not known"));
        };
        let own = self.table.credit_read().map(|slot| slot.wr_id());
        let number = own.unwrap_or(credits.number.get().wrapping_add(ONE));
        credits.number.set(number);
        let mut element = credits.words.answer_element;
        let mut request = ffi::ibv_send_wr {
            wr_id: number,
            sg_list: &raw mut element,
            num_sge: 1,
            opcode: ffi::ibv_wr_opcode::IBV_WR_RDMA_READ,
            send_flags: ffi::ibv_send_flags::IBV_SEND_SIGNALED.0,
            ..Default::default()
        };
        request.wr.rdma = rdma(&remote);
        let mut refused = ptr::null_mut();
        // SAFETY: the queue pair is live: a caller has found the table open, or is one of its posts. The list is one
        // well-formed request. The caller of `Core::new` guarantees the memory, which is read only with no read in
        // flight.
        let returned =
            unsafe { ffi::ibv_post_send(self.queue_pair, &raw mut request, &raw mut refused) };
        // If the verb names no refused request, the device may have it: see `Templates::may_be_posted`.
        credits.reading.set(returned == 0 || refused.is_null());
        ffi::status(VERB, returned)
    }

    /// Asks the peer if credit is short.
    ///
    /// # Errors
    ///
    ///  - `NoCredit`: credit is short.
    ///  - Those of the verb, and of an earlier credit read.
    pub(crate) fn require_credits(&self, messages: u32) -> TransportResult<()> {
        let Some(credits) = &self.credits else { return Ok(()) };
        if let Some(error) = credits.failed.get() {
            return Err(TransportError::Work(error));
        }
        if credits.available() >= messages {
            return Ok(());
        }
        self.read_credits(credits)?;
        Err(TransportError::NoCredit)
    }

    #[cold]
    #[inline(never)]
    pub(in crate::channel) fn refuse_without_credit(&self, messages: u32) -> TransportError {
        let Some(credits) = &self.credits else { return TransportError::NoCredit };
        // A program may post again and again without polling.
        while credits.reading.get() {
            match self.settle() {
                Ok(true) => {}
                Ok(false) => break,
                Err(error) => return error,
            }
        }
        self.require_credits(messages).err().unwrap_or(TransportError::NoCredit)
    }

    /// Does not stop the channel at a time-out or cancellation, since nothing was posted.
    #[cold]
    #[inline(never)]
    pub(in crate::channel) fn wait_for_blocking_credit(
        &self,
        deadline: Option<Instant>,
    ) -> TransportResult<()> {
        self.wait_for_credit(deadline).inspect_err(|error| {
            let stops = match error {
                TransportError::NoCredit | TransportError::Cancelled | TransportError::Work(_) => {
                    false
                }
                // The peer's word is not known.
                TransportError::Verbs(error) => error.kind() != ErrorKind::InvalidInput,
                _ => true,
            };
            if stops && self.table.is_open() {
                self.stop();
            }
        })
    }

    /// Reads the clock of credit reads.
    pub(crate) fn credit_now(&self) -> Instant {
        self.credits.as_deref().map_or_else(Instant::now, |credits| credits.clock.now())
    }

    /// Returns when the peer may be asked, by that clock. `None`: a read is in flight.
    pub(crate) fn credit_ask_at(&self) -> Option<Instant> {
        let credits = self.credits.as_deref().filter(|credits| !credits.reading.get())?;
        Some(credits.ask_at.get().unwrap_or_else(|| credits.clock.now()))
    }

    /// Returns how long until the peer may be asked. `None`: a read is in flight.
    pub(in crate::channel) fn credit_pause(&self) -> Option<Duration> {
        let credits = self.credits.as_deref().filter(|credits| !credits.reading.get())?;
        Some(credits.pause().unwrap_or_default())
    }

    pub(crate) fn credit_number(&self) -> Option<u64> {
        self.credits.as_deref().map(|credits| credits.number.get())
    }

    /// Sets the number before a loop's first credit read.
    pub(crate) fn set_credit_number(&self, number: u64) {
        if let Some(credits) = &self.credits {
            credits.number.set(number);
        }
    }

    pub(crate) fn available_credits(&self) -> Option<u32> {
        self.credits.as_deref().map(Credits::available)
    }

    /// Asks the peer if few credits are left.
    fn use_credits(&self, credits: &Credits, messages: u32) {
        credits.sent.set(credits.sent.get().wrapping_add(messages));
        if credits.available() <= credits.most.get() / 2 {
            // It is tried again when no credit is left.
            let _ = self.read_credits(credits);
        }
    }

    /// Returns at once without flow control.
    pub(in crate::channel) fn wait_for_credit(
        &self,
        deadline: Option<Instant>,
    ) -> TransportResult<()> {
        if self.credits.is_none() {
            return Ok(());
        }
        let mut wait = Wait::new(deadline);
        loop {
            if !self.table.is_open() {
                return Err(self.refusal(Queue::Send));
            }
            match self.require_credits(1) {
                Err(TransportError::NoCredit) => {}
                result => return result,
            }
            if self.settle()? {
                continue;
            }
            // Without a read in flight, nothing would wake the thread.
            if let Some(pause) = self.credit_pause() {
                self.pause_for_credit(pause, deadline)?;
            } else {
                match self.on_empty_poll(&mut wait) {
                    Err(TransportError::TimedOut) => return Err(TransportError::NoCredit),
                    waited => waited?,
                }
            }
        }
    }

    pub(in crate::channel) fn poll_credit(&self) -> TransportResult<bool> {
        if self.credits.is_none() {
            return Ok(true);
        }
        if !self.table.is_open() {
            return Err(self.refusal(Queue::Send));
        }
        self.settle()?;
        match self.require_credits(1) {
            Err(TransportError::NoCredit) => Ok(false),
            result => result.map(|()| true),
        }
    }

    /// Sleeps if the channel may, or spins once. The caller's polls move a virtual clock on.
    fn pause_for_credit(&self, pause: Duration, deadline: Option<Instant>) -> TransportResult<()> {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        if left.is_some_and(|left| left.is_zero()) {
            return Err(TransportError::NoCredit);
        }
        if self.cancel.get().is_some_and(|cancel| cancel.take()) {
            return Err(TransportError::Cancelled);
        }
        match (&self.credits, self.settings.sleep) {
            (Some(credits), _) if credits.clock.is_virtual() => {}
            (_, Some(_)) => thread::sleep(left.map_or(pause, |left| left.min(pause))),
            (_, None) => hint::spin_loop(),
        }
        Ok(())
    }
}

/// Returns [`NO_CREDIT`] if credit is short for the list, or a credit read has failed.
///
/// # Safety
///
/// `core` points to the core of a live queue pair with flow control. The rest is as for `ibv_post_send`.
unsafe extern "C" fn post_send(
    core: *mut ffi::ibv_qp,
    request: *mut ffi::ibv_send_wr,
    refused: *mut *mut ffi::ibv_send_wr,
) -> c_int {
    // SAFETY: `core` points to a core, by the caller's contract.
    let core = unsafe { &*core.cast_const().cast::<Core>() };
    // SAFETY: the list is well-formed, by the caller's contract.
    let messages = unsafe { messages(request) };
    let credits = core.credits.as_deref().filter(|_| messages > 0);
    if credits
        .is_some_and(|credits| credits.available() < messages || credits.failed.get().is_some())
    {
        // A value in `refused` would be taken for the provider's answer to a later request.
        return NO_CREDIT;
    }
    // SAFETY: the queue pair is live and the arguments are valid, by the caller's contract.
    let returned = unsafe { ffi::ibv_post_send(core.queue_pair, request, refused) };
    if let (Some(credits), 0) = (credits, returned) {
        core.use_credits(credits, messages);
    }
    returned
}

/// Counts requests that take a receive of the peer.
///
/// # Safety
///
/// The list is well-formed.
unsafe fn messages(mut request: *const ffi::ibv_send_wr) -> u32 {
    let mut messages = 0;
    while !request.is_null() {
        // SAFETY: the list is well-formed, so this is a valid request.
        let (opcode, next) = unsafe { ((*request).opcode, (*request).next) };
        messages += u32::from(takes_receive(opcode));
        request = next;
    }
    messages
}

/// Counts the receive.
///
/// # Safety
///
/// As for [`post_send`].
unsafe extern "C" fn post_recv(
    core: *mut ffi::ibv_qp,
    request: *mut ffi::ibv_recv_wr,
    refused: *mut *mut ffi::ibv_recv_wr,
) -> c_int {
    // SAFETY: `core` points to a core, by the caller's contract.
    let core = unsafe { &*core.cast_const().cast::<Core>() };
    // SAFETY: the queue pair is live and the arguments are valid, by the caller's contract.
    let returned = unsafe { ffi::ibv_post_recv(core.queue_pair, request, refused) };
    if let (Some(credits), 0) = (&core.credits, returned) {
        credits.count_receive();
    }
    returned
}

/// # Flow control
///
/// For a channel that was built with [`flow_control`](crate::ChannelBuilder::flow_control).
impl Channel<'_> {
    /// The number of messages that may be sent before the channel asks the peer again: receives of the peer known to be
    /// free. `None`: the channel has no flow control.
    ///
    /// It begins with 0. A send or [`wait_for_credit`](Self::wait_for_credit) asks the peer, and polling for
    /// completions sees the answer.
    pub fn credits(&self) -> Option<u32> {
        self.core().available_credits()
    }

    /// Waits without a time limit until a message may be sent. Without flow control, returns at once.
    ///
    /// ```
    /// # fn send(channel: &mut ibverbs::Channel<'_>, region: &ibverbs::MemoryRegion<'_, u8>) -> ibverbs::TransportResult<()> {
    /// // A scope refuses a message for which there is no credit.
    /// channel.wait_for_credit()?;
    /// channel.scope(|scope| scope.post_send(region.slice(..)?)?.wait().map(drop))?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    ///  - [`Work`](TransportError::Work): the peer could not be asked, and the connection has failed.
    ///  - [`Verbs`](TransportError::Verbs), [`UnknownCompletion`](TransportError::UnknownCompletion): polling or
    ///    posting failed.
    ///  - [`Cancelled`](TransportError::Cancelled): a [`CancelHandle`](crate::channel::CancelHandle) ended the wait.
    ///    The channel goes on.
    ///  - [`Stopped`](TransportError::Stopped), [`Closed`](TransportError::Closed): the channel is stopped.
    pub fn wait_for_credit(&mut self) -> TransportResult<()> {
        self.core().wait_for_credit(None)
    }

    /// As [`wait_for_credit`](Self::wait_for_credit), but gives up at `deadline`.
    ///
    /// # Errors
    ///
    /// Those of [`wait_for_credit`](Self::wait_for_credit), and
    ///
    ///  - [`NoCredit`](TransportError::NoCredit): the deadline has passed. The channel goes on.
    pub fn wait_for_credit_until(&mut self, deadline: Instant) -> TransportResult<()> {
        self.core().wait_for_credit(Some(deadline))
    }
}

/// # Flow control
///
/// As for [a channel](Channel#flow-control).
impl Scope<'_, '_> {
    /// See [`Channel::credits`].
    pub fn credits(&self) -> Option<u32> {
        self.core.available_credits()
    }

    pub(in crate::channel) fn poll_credit(&self) -> TransportResult<bool> {
        self.core.poll_credit()
    }

    /// See [`Channel::wait_for_credit`].
    ///
    /// # Errors
    ///
    /// Those of [`Channel::wait_for_credit`].
    pub fn wait_for_credit(&self) -> TransportResult<()> {
        self.core.wait_for_credit(None)
    }

    /// See [`Channel::wait_for_credit_until`].
    ///
    /// # Errors
    ///
    /// Those of [`Channel::wait_for_credit_until`].
    pub fn wait_for_credit_until(&self, deadline: Instant) -> TransportResult<()> {
        self.core.wait_for_credit(Some(deadline))
    }
}
