//! Flow control: a channel sends only what the peer has posted receives for.
//!
//! Each side counts the receives that it has posted since it was connected, in a word of memory that the peer
//! may read. The peer counts the messages that it has sent. The difference is the number of its credits. When
//! they run low, it reads the word again by an RDMA read, whose result takes effect when its completion is
//! dispatched: see [`Core::take_credits`]. So the side that receives does nothing but count, and cannot forget
//! to tell the last receives; and the side that sends waits for a completion, as for everything else, so it can
//! sleep.
//!
//! Nothing of the peer is believed. Whatever the word holds, at worst a message is sent that has no receive,
//! as without flow control, or none is sent.

use std::cell::Cell;
use std::ffi::c_int;
use std::hint;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::Channel;
use super::core::Core;
use super::error::{TransportError, TransportResult};
use super::in_flight::{Owner, Queue, State};
use super::operation::{PostFunctions, takes_receive};
use super::wait::Wait;
use crate::completion::{WorkCompletion, WorkError};
use crate::error::{Error, ErrorKind, Result};
use crate::ffi;
use crate::memory::{AccessFlags, LocalMemory, RemoteMemoryRegion, SharedMemoryRegion};
use crate::queue_pair::work_request::remote::rdma;

/// The index of the read of the peer's word. It has no slot, as there is at most one at a time.
pub(super) const CREDITS: u32 = u32::MAX - 1;

/// Requests on the send queue beyond those of the program: the read of the peer's word.
pub(super) const OWN_SENDS: u32 = 1;

/// The indices of the words in their region: the count that the peer reads, and what was read from the peer.
/// They are on different cache lines.
const COUNT: usize = 0;
const ANSWER: usize = 8;
const WORDS: usize = 16;

/// The length of the word that a peer reads.
pub(super) const WORD: u64 = size_of::<u64>() as u64;

/// The memory that a channel with flow control needs.
pub(super) type CreditRegion<'res> = SharedMemoryRegion<'res, u64>;

/// The number of reads in a row without a new credit after which a wait pauses before the next one.
const READS_WITHOUT_PAUSE: u32 = 4;

/// The longest pause is `1 << MAX_PAUSE` microseconds.
const MAX_PAUSE: u32 = 10;

/// What [`COUNTING`] returns for a message without credit. No provider returns it.
pub(super) const NO_CREDIT: c_int = c_int::MIN;

/// The functions that a channel with flow control posts with. Their first argument is the channel's core. So a
/// channel without flow control does not even check whether it has any.
pub(super) const COUNTING: PostFunctions = (post_send, post_recv);

/// As `ibv_post_send`, for a message that has a credit.
///
/// # Safety
///
/// `core` points to the core of a live queue pair, with flow control, and the rest is as for `ibv_post_send`,
/// for a list of one request.
unsafe extern "C" fn post_send(
    core: *mut ffi::ibv_qp,
    request: *mut ffi::ibv_send_wr,
    refused: *mut *mut ffi::ibv_send_wr,
) -> c_int {
    // SAFETY: the caller vouches for it.
    let (core, opcode) = unsafe { (&*core.cast_const().cast::<Core>(), (*request).opcode) };
    let credits = core.credits.as_deref().filter(|_| takes_receive(opcode));
    if credits.is_some_and(|credits| credits.available() == 0 || credits.failed.get().is_some()) {
        // SAFETY: the caller vouches for the place.
        unsafe { *refused = request };
        return NO_CREDIT;
    }
    // SAFETY: the caller vouches for everything.
    let returned = unsafe { ffi::ibv_post_send(core.queue_pair, request, refused) };
    if let (Some(credits), 0) = (credits, returned) {
        core.use_credit(credits);
    }
    returned
}

/// As `ibv_post_recv`, and counts the receive.
///
/// # Safety
///
/// As for [`post_send`].
unsafe extern "C" fn post_recv(
    core: *mut ffi::ibv_qp,
    request: *mut ffi::ibv_recv_wr,
    refused: *mut *mut ffi::ibv_recv_wr,
) -> c_int {
    // SAFETY: the caller vouches for it.
    let core = unsafe { &*core.cast_const().cast::<Core>() };
    // SAFETY: the caller vouches for everything.
    let returned = unsafe { ffi::ibv_post_recv(core.queue_pair, request, refused) };
    if let (Some(credits), 0) = (&core.credits, returned) {
        credits.count_receive();
    }
    returned
}

/// Where the words of a channel are.
#[derive(Clone, Copy, Debug)]
pub(super) struct CreditWords {
    count: *const AtomicU64,
    answer: *const AtomicU64,
    answer_element: ffi::ibv_sge,
}

/// The region of a channel's words.
pub(super) fn register<'res>(
    domain: crate::parent::Parent<'res, crate::domain::ProtectionDomain<'res>>,
) -> Result<CreditRegion<'res>> {
    let mut access = AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_READ;
    if domain.context().is_iwarp() {
        // There the peer answers a read by writing.
        access |= AccessFlags::REMOTE_WRITE;
    }
    SharedMemoryRegion::new(domain, WORDS, access)
}

impl CreditWords {
    pub(super) fn new(region: &CreditRegion<'_>) -> Result<Self> {
        Ok(Self {
            count: region.atomic(COUNT)?,
            answer: region.atomic(ANSWER)?,
            answer_element: region.sge(ANSWER..ANSWER + 1)?,
        })
    }
}

/// The part of the region that the peer needs to know.
pub(super) fn word_for_peer(region: &CreditRegion<'_>) -> Option<RemoteMemoryRegion> {
    region.remote_range(COUNT..COUNT + 1).ok()
}

/// The capacities of the queue pair of a channel with or without flow control.
pub(super) fn with_own_sends(
    mut capacities: ffi::ibv_qp_cap,
    flow_control: bool,
) -> ffi::ibv_qp_cap {
    if flow_control {
        capacities.max_send_wr = capacities.max_send_wr.saturating_add(OWN_SENDS);
    }
    capacities
}

/// Sets the word of the peer, if both sides have flow control.
///
/// # Errors
///
///  - `EINVAL`: only one side has flow control, or the word is too short.
pub(super) fn agree(ours: Option<&Credits>, theirs: Option<RemoteMemoryRegion>) -> Result<()> {
    let reason = match (ours, theirs) {
        (None, None) => return Ok(()),
        (Some(ours), Some(word)) if word.length() >= WORD => {
            ours.peer.set(Some(word));
            return Ok(());
        }
        (Some(_), Some(_)) => "the peer's credit word has less than 8 bytes",
        (Some(_), None) => {
            "this channel was built with flow_control, and the peer's was not: both sides need it"
        }
        (None, Some(_)) => {
            "the peer's channel was built with flow_control, and this one was not: both sides need it"
        }
    };
    Err(Error::invalid("ibv_modify_qp", reason))
}

/// A count as it is in memory, in network order. The upper half is the complement of the lower one, so that a
/// word that was read while it was written, or holds something else, is not taken for a count.
fn encode(count: u32) -> u64 {
    (u64::from(!count) << 32 | u64::from(count)).to_be()
}

fn decode(word: u64) -> Option<u32> {
    let word = u64::from_be(word);
    let (complement, count) = ((word >> 32) as u32, word as u32);
    (complement == !count).then_some(count)
}

/// The state of both directions. Counts begin at 0 with each connection, and wrap around.
#[derive(Debug)]
pub(super) struct Credits {
    words: CreditWords,
    /// The peer's word, if it is known.
    peer: Cell<Option<RemoteMemoryRegion>>,
    /// The receives that we have posted.
    posted: Cell<u32>,
    /// The messages that we have sent.
    sent: Cell<u32>,
    /// The receives that the peer has posted, as far as we know.
    granted: Cell<u32>,
    /// The most credits that there were at a time.
    most: Cell<u32>,
    /// Whether the device has a read of the peer's word.
    reading: Cell<bool>,
    /// How many reads in a row have found nothing new.
    vain: Cell<u32>,
    /// When the peer may be asked again.
    ask_at: Cell<Option<Instant>>,
    /// A read has failed, and with it the connection.
    failed: Cell<Option<WorkError>>,
}

impl Credits {
    pub(super) fn new(words: CreditWords) -> Self {
        Self {
            words,
            peer: Cell::new(None),
            posted: Cell::new(0),
            sent: Cell::new(0),
            granted: Cell::new(0),
            most: Cell::new(0),
            reading: Cell::new(false),
            vain: Cell::new(0),
            ask_at: Cell::new(None),
            failed: Cell::new(None),
        }
    }

    pub(super) fn words(&self) -> CreditWords {
        self.words
    }

    fn publish(&self, word: u64) {
        // SAFETY: the caller of `Core::new` vouches for the memory.
        unsafe { &*self.words.count }.store(word, Ordering::Release);
    }

    /// Begins to count the receives of a connection.
    pub(super) fn open(&self) {
        self.close();
        self.publish(encode(0));
    }

    /// Ends the counting: the queue pair was reset or destroyed.
    pub(super) fn close(&self) {
        // Not a count.
        self.publish(0);
        self.posted.set(0);
        self.sent.set(0);
        self.granted.set(0);
        self.most.set(0);
        self.reading.set(false);
        self.note_answer(true);
        self.failed.set(None);
    }

    /// There is no peer any more.
    pub(super) fn forget_peer(&self) {
        self.peer.set(None);
    }

    /// The number of messages that may be sent. At most half of the range of the counters: more is not
    /// possible, whatever a peer says.
    pub(super) fn available(&self) -> u32 {
        let available = self.granted.get().wrapping_sub(self.sent.get());
        if available > u32::MAX / 2 { 0 } else { available }
    }

    /// Counts a receive that was posted.
    fn count_receive(&self) {
        self.posted.set(self.posted.get().wrapping_add(1));
        self.publish(encode(self.posted.get()));
    }

    /// Decides when the peer may be asked again.
    fn note_answer(&self, has_news: bool) {
        let vain = if has_news { 0 } else { self.vain.get().saturating_add(1) };
        self.vain.set(vain);
        self.ask_at.set(vain.checked_sub(READS_WITHOUT_PAUSE).and_then(|vain| {
            Instant::now().checked_add(Duration::from_micros(1 << vain.min(MAX_PAUSE)))
        }));
    }

    /// How long to wait until the peer may be asked again.
    fn pause(&self) -> Option<Duration> {
        if self.reading.get() {
            return None;
        }
        let left = self.ask_at.get()?.saturating_duration_since(Instant::now());
        if left.is_zero() {
            self.ask_at.set(None);
            return None;
        }
        Some(left)
    }
}

impl Core {
    /// Handles the end of a read of the peer's word. Returns false if there is none in flight.
    #[cold]
    pub(super) fn take_credits(&self, completion: &WorkCompletion) -> bool {
        let Some(credits) = &self.credits else { return false };
        if !credits.reading.replace(false) {
            return false;
        }
        match completion.result() {
            Ok(_) => {
                // SAFETY: the caller of `Core::new` vouches for the memory.
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

    /// Posts a read of the peer's word, unless one is in flight, or the last ones have found nothing and it is too
    /// early for the next.
    ///
    /// # Errors
    ///
    /// Those of the verb. The device may have the read nevertheless: its buffer is the channel's.
    fn read_credits(&self, credits: &Credits) -> Result<()> {
        const VERB: &str = "ibv_post_send";

        if credits.reading.get() || credits.pause().is_some() {
            return Ok(());
        }
        let Some(remote) = credits.peer.get() else {
            let reason = "the peer's credit word is not known: the connection manager does not exchange \
                          it, so give it to Channel::set_peer_credit_word";
            return Err(Error::invalid(VERB, reason));
        };
        let mut element = credits.words.answer_element;
        let mut request = ffi::ibv_send_wr {
            wr_id: self.epoch.get() | u64::from(CREDITS),
            sg_list: &raw mut element,
            num_sge: 1,
            opcode: ffi::ibv_wr_opcode::IBV_WR_RDMA_READ,
            send_flags: ffi::ibv_send_flags::IBV_SEND_SIGNALED.0,
            ..Default::default()
        };
        request.wr.rdma = rdma(&remote);
        let mut refused = ptr::null_mut();
        // SAFETY: the callers have found the table open, or are called by its posts, so the queue pair is live.
        // The request is one well-formed element of a list. The caller of `Core::new` vouches for the memory,
        // which is read only when no read is in flight.
        let returned =
            unsafe { ffi::ibv_post_send(self.queue_pair, &raw mut request, &raw mut refused) };
        // If no request is named, the device may have it: see `Prepared::may_be_posted`.
        credits.reading.set(returned == 0 || refused.is_null());
        ffi::status(VERB, returned)
    }

    /// Checks that a message may be sent. If there is no credit, asks the peer for more.
    fn require_credit(&self, credits: &Credits) -> TransportResult<()> {
        if let Some(error) = credits.failed.get() {
            return Err(TransportError::Work(error));
        }
        if credits.available() > 0 {
            return Ok(());
        }
        self.read_credits(credits)?;
        Err(TransportError::NoCredit)
    }

    /// The error of a post without credit, of an operation in this state.
    #[cold]
    #[inline(never)]
    pub(super) fn refuse_without_credit(&self, state: State) -> TransportError {
        let Some(credits) = &self.credits else { return TransportError::NoCredit };
        // A program may post again and again, and poll nothing meanwhile, as there is nothing in flight. Tasks
        // must not be woken here; their reactor polls.
        if state != State::InFlight(Owner::Task) {
            while credits.reading.get() {
                match self.progress() {
                    Ok(true) => {}
                    Ok(false) => break,
                    Err(error) => return error,
                }
            }
        }
        self.require_credit(credits).err().unwrap_or(TransportError::NoCredit)
    }

    /// Waits for the credit of a blocking operation. If the deadline passes, the channel is not stopped, since
    /// nothing was posted.
    #[cold]
    #[inline(never)]
    pub(super) fn wait_for_blocking_credit(
        &self,
        deadline: Option<Instant>,
    ) -> TransportResult<()> {
        self.wait_for_credit(deadline).inspect_err(|error| {
            // As every other wait of a blocking operation that fails.
            let stops = match error {
                TransportError::NoCredit | TransportError::Work(_) => false,
                // The peer's word is not known.
                TransportError::Verbs(error) => error.kind() != ErrorKind::InvalidInput,
                _ => true,
            };
            if stops && self.table.is_open() {
                self.stop();
            }
        })
    }

    /// How long a sender that was refused for lack of credit pauses before it asks. `None`: a question is in flight.
    pub(super) fn credit_pause(&self) -> Option<Duration> {
        let credits = self.credits.as_deref().filter(|credits| !credits.reading.get())?;
        // The pause may be over by now, and nothing was asked.
        Some(credits.pause().unwrap_or_default())
    }

    /// Whether there is no credit, and a question is in flight whose answer will tell.
    pub(super) fn is_asking_for_credit(&self) -> bool {
        self.credits.as_deref().is_some_and(|credits| {
            credits.reading.get() && credits.available() == 0 && credits.failed.get().is_none()
        })
    }

    /// The number of credits, if the channel has flow control.
    pub(super) fn available_credits(&self) -> Option<u32> {
        self.credits.as_deref().map(Credits::available)
    }

    /// Counts a message that was sent. If few credits are left, asks the peer for more.
    fn use_credit(&self, credits: &Credits) {
        credits.sent.set(credits.sent.get().wrapping_add(1));
        if credits.available() <= credits.most.get() / 2 {
            // If it fails, it is tried again when there is no credit left.
            let _ = self.read_credits(credits);
        }
    }

    /// Waits until there is a credit, or the deadline has passed. Without flow control it returns at once.
    pub(super) fn wait_for_credit(&self, deadline: Option<Instant>) -> TransportResult<()> {
        let Some(credits) = &self.credits else { return Ok(()) };
        let mut wait = Wait::new(deadline);
        loop {
            if !self.table.is_open() {
                return Err(self.refusal(Queue::Send));
            }
            match self.require_credit(credits) {
                Err(TransportError::NoCredit) => {}
                result => return result,
            }
            if self.progress()? {
                continue;
            }
            // Only the end of a read would wake a thread that sleeps.
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

    /// Polls once, without waiting. Returns whether a message may be sent.
    pub(super) fn poll_credit(&self) -> TransportResult<bool> {
        let Some(credits) = &self.credits else { return Ok(true) };
        if !self.table.is_open() {
            return Err(self.refusal(Queue::Send));
        }
        self.progress()?;
        match self.require_credit(credits) {
            Err(TransportError::NoCredit) => Ok(false),
            result => result.map(|()| true),
        }
    }

    /// A part of a pause: spins, or sleeps if the channel may.
    fn pause_for_credit(&self, pause: Duration, deadline: Option<Instant>) -> TransportResult<()> {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        if left.is_some_and(|left| left.is_zero()) {
            return Err(TransportError::NoCredit);
        }
        if self.cancel.get().is_some_and(|cancel| cancel.take()) {
            return Err(TransportError::Cancelled);
        }
        match self.sleep {
            Some(_) => thread::sleep(left.map_or(pause, |left| left.min(pause))),
            None => hint::spin_loop(),
        }
        Ok(())
    }
}

/// # Flow control
///
/// For a channel that was built with [`flow_control`](crate::ChannelBuilder::flow_control).
impl Channel<'_> {
    /// The number of messages that may be sent before the peer is asked again: so many of its receives are known
    /// to be free. The peer may have posted more. `None`: the channel has no flow control.
    ///
    /// It is 0 after the channel was connected. What asks the peer is a send, or
    /// [`wait_for_credit`](Self::wait_for_credit); the answer is seen when completions are polled.
    pub fn credits(&self) -> Option<u32> {
        self.core().available_credits()
    }

    /// Waits until a message may be sent, however long that takes. A channel without flow control may always
    /// send.
    ///
    /// ```
    /// # fn send(channel: &mut ibverbs::Channel<'_>, pool: &ibverbs::BufferPool) -> Result<(), Box<dyn std::error::Error>> {
    /// use ibverbs::TransportError;
    ///
    /// let mut buffer = pool.take().ok_or("all buffers are in use")?;
    /// let mut sending = loop {
    ///     match channel.post_send_owned(buffer) {
    ///         Ok(sending) => break sending,
    ///         Err(refused) if refused.error == TransportError::NoCredit => {
    ///             buffer = refused.buffer;
    ///             channel.wait_for_credit()?;
    ///         }
    ///         Err(refused) => return Err(refused.into()),
    ///     }
    /// };
    /// sending.wait(channel)?.result?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    ///  - [`Work`](TransportError::Work): the peer could not be asked, and the connection has failed.
    ///  - [`Verbs`](TransportError::Verbs), [`UnknownCompletion`](TransportError::UnknownCompletion): polling
    ///    or posting failed.
    ///  - [`Cancelled`](TransportError::Cancelled): a [`CancelHandle`](crate::CancelHandle) has ended the wait.
    ///    Nothing was stopped.
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
    ///  - [`NoCredit`](TransportError::NoCredit): the deadline has passed. Nothing was stopped.
    pub fn wait_for_credit_deadline(&mut self, deadline: Instant) -> TransportResult<()> {
        self.core().wait_for_credit(Some(deadline))
    }

    /// Sets where the peer counts its receives: the [`credit_word`](crate::QueuePairEndpoint::credit_word) of its
    /// endpoint.
    ///
    /// Only a channel that was connected by the connection manager needs this, because that does not exchange
    /// endpoints. Send the word as private data
    /// ([`RemoteMemoryRegion::to_bytes`](crate::RemoteMemoryRegion::to_bytes)). Until it is set, sends fail.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the channel has no flow control, or the word has less than 8 bytes.
    pub fn set_peer_credit_word(&mut self, word: RemoteMemoryRegion) -> Result<()> {
        agree(self.core().credits.as_deref(), Some(word))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_words_are_counts() {
        for count in [0, 1, 255, 256, 0x8000_0000, u32::MAX] {
            assert_eq!(decode(encode(count)), Some(count));
        }
        assert_eq!(decode(0), None);
        assert_eq!(decode(u64::MAX), None);
        assert_eq!(encode(0x0102_0304).to_ne_bytes(), [0xfe, 0xfd, 0xfc, 0xfb, 1, 2, 3, 4]);
        // Read while it changes from one count to the next, byte after byte, from either end.
        for (old, new) in [(0, 1), (255, 256), (0xffff, 0x1_0000), (u32::MAX, 0), (41, 42)] {
            let (old_word, new_word) = (encode(old).to_ne_bytes(), encode(new).to_ne_bytes());
            for done in 0..=8 {
                let mut forward = old_word;
                forward[..done].copy_from_slice(&new_word[..done]);
                let mut backward = old_word;
                backward[done..].copy_from_slice(&new_word[done..]);
                for torn in [forward, backward] {
                    let read = decode(u64::from_ne_bytes(torn));
                    assert!(read.is_none_or(|count| count == old || count == new), "{torn:?}");
                }
            }
        }
    }

    #[test]
    fn counters_wrap_around_and_lies_are_no_credits() {
        let words = [AtomicU64::new(1), AtomicU64::new(1)];
        let words = CreditWords {
            count: &raw const words[0],
            answer: &raw const words[1],
            answer_element: ffi::ibv_sge::default(),
        };
        let credits = Credits::new(words);
        for (granted, sent, available) in
            [(0, 0, 0), (5, 3, 2), (1, u32::MAX, 2), (3, 5, 0), (0x8000_0003, 2, 0), (7, 7, 0)]
        {
            credits.granted.set(granted);
            credits.sent.set(sent);
            assert_eq!(credits.available(), available, "{granted} - {sent}");
        }
        // SAFETY: it is a local variable.
        let word = || unsafe { &*words.count }.load(Ordering::Relaxed);
        credits.open();
        assert_eq!((decode(word()), credits.available()), (Some(0), 0));
        credits.posted.set(u32::MAX);
        credits.count_receive();
        assert_eq!(decode(word()), Some(0));
        credits.close();
        assert_eq!(decode(word()), None);
    }
}
