//! Flow control: a channel sends only what the peer has posted receives for.
//!
//! Each side counts the receives that it posts on a connection, in a word that the peer may read. Credits are this
//! count less the messages sent. When they run low, the sender reads the word by an RDMA read, the credit read. So the
//! receiver announces nothing, and the sender can sleep on its completion queue.
//!
//! The peer's word is not trusted. Whatever it holds, the worst is a message without a receive, as without flow
//! control, or no message at all.

mod ask;

use std::cell::Cell;
use std::ffi::c_int;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::base::{Error, Result, ffi};
use crate::verbs::completion::WorkError;
use crate::verbs::device::Clock;
use crate::verbs::domain::DomainRef;
use crate::verbs::memory::{AccessFlags, LocalMemory, RemoteMemoryRegion, SharedMemoryRegion};
use crate::verbs::queue_pair::QueuePairEndpoint;

/// A message has no credit. No provider returns this value.
pub(crate) const NO_CREDIT: c_int = c_int::MIN;

/// The word for the peer, and the answer read from it, on different cache lines.
const COUNT: usize = 0;
const ANSWER: usize = 8;
const WORDS: usize = 16;

/// Bytes.
pub(super) const WORD: u64 = size_of::<u64>() as u64;

pub(super) type CreditRegion<'res> = SharedMemoryRegion<'res, u64>;

/// Reads in a row without new credit, before a wait pauses.
const READS_WITHOUT_PAUSE: u32 = 4;

/// The longest is `1 << MAX_PAUSE` microseconds.
const MAX_PAUSE: u32 = 10;

#[derive(Clone, Copy, Debug)]
pub(super) struct CreditWords {
    count: *const AtomicU64,
    answer: *const AtomicU64,
    answer_element: ffi::ibv_sge,
}

pub(super) fn register<'res>(domain: DomainRef<'res>) -> Result<CreditRegion<'res>> {
    let mut access = AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_READ;
    if domain.context().is_iwarp() {
        // On iWARP, the answer to a read is a write by the peer.
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

pub(super) fn word_for_peer(region: &CreditRegion<'_>) -> Option<RemoteMemoryRegion> {
    region.remote_range(COUNT..COUNT + 1).ok()
}

/// With room for the credit read.
pub(super) fn with_own_sends(
    mut capacities: ffi::ibv_qp_cap,
    flow_control: bool,
) -> ffi::ibv_qp_cap {
    if flow_control {
        capacities.max_send_wr = capacities.max_send_wr.saturating_add(1);
    }
    capacities
}

/// Keeps the peer's word.
///
/// # Errors
///
///  - `EINVAL`: only one side has it, or the word is too short.
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

/// Checks that both sides answer reads.
///
/// # Errors
///
///  - `EINVAL`: a side answers none.
pub(super) fn check_reads(ours: &QueuePairEndpoint, theirs: &QueuePairEndpoint) -> Result<()> {
    if theirs.credit_word().is_none() {
        return Ok(());
    }
    for (what, answered) in [
        (
            "for flow_control, the number of reads that the peer answers",
            theirs.max_dest_rd_atomic(),
        ),
        (
            "for flow_control, the number of reads that this channel answers",
            ours.max_dest_rd_atomic(),
        ),
    ] {
        if let Some(answered) = answered {
            Error::within("ibv_modify_qp", what, answered, 1, u8::MAX)?;
        }
    }
    Ok(())
}

/// Puts a count into network order. The complement in the upper half shows a word that was read during a write.
fn encode(count: u32) -> u64 {
    (u64::from(!count) << 32 | u64::from(count)).to_be()
}

fn decode(word: u64) -> Option<u32> {
    let word = u64::from_be(word);
    let (complement, count) = ((word >> 32) as u32, word as u32);
    (complement == !count).then_some(count)
}

/// Counts begin with 0 on each connection and wrap around.
#[derive(Debug)]
pub(crate) struct Credits {
    pub(super) words: CreditWords,
    clock: Clock,
    peer: Cell<Option<RemoteMemoryRegion>>,
    /// Our receives.
    posted: Cell<u32>,
    /// Our messages.
    sent: Cell<u32>,
    /// The peer's receives, by its last answer.
    granted: Cell<u32>,
    /// The most credits so far.
    most: Cell<u32>,
    /// The number of the last credit read.
    number: Cell<u64>,
    /// That read is in flight.
    reading: Cell<bool>,
    vain: Cell<u32>,
    /// When the peer may be asked again.
    ask_at: Cell<Option<Instant>>,
    /// A read has failed, and the connection with it.
    failed: Cell<Option<WorkError>>,
}

impl Credits {
    pub(super) fn new(words: CreditWords, clock: Clock) -> Self {
        Self {
            words,
            clock,
            peer: Cell::new(None),
            posted: Cell::new(0),
            sent: Cell::new(0),
            granted: Cell::new(0),
            most: Cell::new(0),
            number: Cell::new(0),
            reading: Cell::new(false),
            vain: Cell::new(0),
            ask_at: Cell::new(None),
            failed: Cell::new(None),
        }
    }

    fn publish(&self, word: u64) {
        // SAFETY: the caller of `Core::new` guarantees that the words are valid.
        unsafe { &*self.words.count }.store(word, Ordering::Release);
    }

    pub(super) fn open(&self) {
        self.close();
        self.publish(encode(0));
    }

    /// Stops after the queue pair was reset or destroyed.
    pub(super) fn close(&self) {
        // 0 is not a count.
        self.publish(0);
        self.posted.set(0);
        self.sent.set(0);
        self.granted.set(0);
        self.most.set(0);
        self.reading.set(false);
        self.note_answer(true);
        self.failed.set(None);
    }

    pub(super) fn forget_peer(&self) {
        self.peer.set(None);
    }

    /// Counts more than half of the range as 0, whatever the peer's word says.
    pub(super) fn available(&self) -> u32 {
        let available = self.granted.get().wrapping_sub(self.sent.get());
        if available > u32::MAX / 2 { 0 } else { available }
    }

    fn count_receive(&self) {
        self.posted.set(self.posted.get().wrapping_add(1));
        self.publish(encode(self.posted.get()));
    }

    fn note_answer(&self, has_news: bool) {
        let vain = if has_news { 0 } else { self.vain.get().saturating_add(1) };
        self.vain.set(vain);
        self.ask_at.set(vain.checked_sub(READS_WITHOUT_PAUSE).and_then(|vain| {
            self.clock.now().checked_add(Duration::from_micros(1 << vain.min(MAX_PAUSE)))
        }));
    }

    /// Returns how long until the peer may be asked. Virtual time passes by itself until then.
    fn pause(&self) -> Option<Duration> {
        if self.reading.get() {
            return None;
        }
        let at = self.ask_at.get()?;
        let left = at.saturating_duration_since(self.clock.now());
        if left.is_zero() {
            self.ask_at.set(None);
            return None;
        }
        self.clock.reach(at);
        Some(left)
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
        // Reads during a change, byte by byte from either end.
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
        // SAFETY: without a context, the clock is the machine's.
        let credits = Credits::new(words, unsafe { Clock::of(std::ptr::null_mut()) });
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
