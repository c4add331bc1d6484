//! One connection of channels: a thread at each end.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use ibverbs::channel::{ScopeError, ScopedPendingWork};
use ibverbs::completion::WorkOpcode;
use ibverbs::{
    Channel, CompareSwapWorkRequest, FetchAddWorkRequest, Inline, MemoryRegion, RemoteMemoryRegion,
    Scope, SendWorkRequest, SharedMemoryRegion, TransportError, WriteWorkRequest,
    memory::MemorySliceMut, settings::MaxAckRetries,
};

use super::{Tally, word};
use crate::Random;
use crate::vm::PATIENCE;
use crate::vm::channels::{ALL, Side, connect, reconnect};

/// Receives that are posted on each side, and requests in flight.
const RECEIVES: usize = 8;
const SENDS: usize = 8;

/// The longest message in words.
const LONGEST: usize = 2048;

/// The memory that the peer works on: a counter, a number that is swapped, an area that is written and read
/// back, and a slot for each receive, for writes with immediate.
const COUNTER: usize = 0;
const SWAPPED: usize = 1;
const AREA: usize = 8;
const SLOTS: usize = AREA + LONGEST;
const WORDS: usize = SLOTS + RECEIVES * LONGEST;

/// The state that both ends of a connection share.
#[derive(Default)]
struct Between {
    /// The number of receives that each side has posted so far.
    ready: [AtomicU64; 2],
    /// The number of messages that each side has sent, plus 1, once it sends no more.
    last: [AtomicU64; 2],
    /// The connection is being broken off.
    broken: AtomicBool,
}

/// The reason for which a scope ends.
#[derive(Debug)]
enum Leave {
    /// Both sides have sent and received everything; only receives are still posted.
    Finished,
    BrokenOff,
    Failed(TransportError),
}

impl From<TransportError> for Leave {
    fn from(error: TransportError) -> Self {
        Self::Failed(error)
    }
}

impl From<ibverbs::Error> for Leave {
    fn from(error: ibverbs::Error) -> Self {
        Self::Failed(error.into())
    }
}

/// The expected content of a request's buffer when the request has ended.
#[derive(Clone, Copy)]
enum Expect {
    Nothing,
    /// Message `number`, as it was written to the area.
    Message(u64),
    /// The value that an atomic found.
    Found(u64),
}

type Buffer<'s> = MemorySliceMut<'s, u64>;

/// One end of the connection, as long as it lasts.
struct End<'s, 'a> {
    scope: &'s Scope<'s, 'a>,
    side: usize,
    /// The region that we send from, and the one that we receive into.
    streams: [u64; 2],
    between: &'a Between,
    memory: &'a SharedMemoryRegion<'static, u64>,
    remote: RemoteMemoryRegion,
    random: &'a mut Random,
    tally: &'a mut Tally,
    idle: Vec<Buffer<'s>>,
    words: Vec<Buffer<'s>>,
    flying: VecDeque<(ScopedPendingWork<'s, Buffer<'s>>, Expect)>,
    inline: VecDeque<ScopedPendingWork<'s, ()>>,
    receives: VecDeque<ScopedPendingWork<'s, Buffer<'s>>>,
    sent: u64,
    received: u64,
    /// The values of the peer's counter and of its other number.
    counter: u64,
    swapped: u64,
}

impl<'s> End<'s, '_> {
    fn fill(buffer: &mut Buffer<'s>, stream: u64, number: u64) {
        buffer.iter_mut().enumerate().for_each(|(index, to)| *to = word(stream, number, index));
    }

    fn check(&mut self, words: &[u64], stream: u64, number: u64) {
        for (index, &found) in words.iter().enumerate() {
            let expected = word(stream, number, index);
            assert_eq!(found, expected, "word {index} of message {number} of stream {stream}");
        }
        self.tally.bytes += 8 * words.len() as u64;
    }

    fn post_receive(&mut self, buffer: Buffer<'s>) -> Result<(), Leave> {
        self.receives.push_back(self.scope.post_receive(buffer)?);
        self.tally.posted += 1;
        self.between.ready[self.side].fetch_add(1, Ordering::Release);
        Ok(())
    }

    fn fly(
        &mut self,
        work: Result<ScopedPendingWork<'s, Buffer<'s>>, TransportError>,
        expect: Expect,
    ) -> Result<(), Leave> {
        self.flying.push_back((work?, expect));
        self.tally.posted += 1;
        Ok(())
    }

    fn may_send(&self) -> bool {
        self.sent < self.between.ready[1 - self.side].load(Ordering::Acquire)
    }

    fn is_reading(&self) -> bool {
        self.flying.iter().any(|(_, expect)| matches!(expect, Expect::Message(_)))
    }

    fn at(&self, first: usize, words: usize) -> RemoteMemoryRegion {
        self.remote.sub_region(8 * first as u64, 8 * words as u64).unwrap()
    }

    /// Posts something if there is room, and returns whether there was.
    fn post(&mut self) -> Result<bool, Leave> {
        // The longest needs two.
        if self.flying.len() + self.inline.len() + 2 > SENDS {
            return Ok(false);
        }
        let (number, stream) = (self.sent, self.streams[0]);
        let pick = self.random.below(100);
        match pick {
            0..70 if !self.may_send() => return Ok(false),
            0..10 => {
                let Some(mut buffer) = self.words.pop() else { return Ok(false) };
                Self::fill(&mut buffer, stream, number);
                let work = self.scope.post(SendWorkRequest::new(buffer).immediate(number as u32));
                self.fly(work, Expect::Nothing)?;
                self.sent += 1;
            }
            10..20 => {
                let bytes = word(stream, number, 0).to_ne_bytes();
                self.inline.push_back(self.scope.post_send(Inline(&bytes))?);
                self.tally.posted += 1;
                self.sent += 1;
            }
            20..50 => {
                let Some(mut buffer) = self.take() else { return Ok(false) };
                Self::fill(&mut buffer, stream, number);
                let work = self.scope.post_send(buffer);
                self.fly(work, Expect::Nothing)?;
                self.sent += 1;
            }
            50..70 => {
                let Some(mut buffer) = self.take() else { return Ok(false) };
                Self::fill(&mut buffer, stream, number);
                let slot = SLOTS + number as usize % RECEIVES * LONGEST;
                let (remote, length) = (self.at(slot, buffer.len()), buffer.len() as u32);
                let work = self.scope.post(WriteWorkRequest::new(buffer, remote).immediate(length));
                self.fly(work, Expect::Nothing)?;
                self.sent += 1;
            }
            // Written and read back, in this order: one send queue carries out one after the other. A read whose
            // answer is lost or late is carried out again, so the next write to the area waits for it.
            70..85 if self.idle.len() >= 2 && !self.is_reading() => {
                let (Some(one), Some(two)) = (self.take(), self.take()) else { unreachable!() };
                let (mut from, to) = if one.len() > two.len() { (one, two) } else { (two, one) };
                let tag = self.random.next() >> 40;
                Self::fill(&mut from, stream, tag);
                let (all, part) = (self.at(AREA, from.len()), self.at(AREA, to.len()));
                let work = self.scope.post_write(from, all);
                self.fly(work, Expect::Nothing)?;
                let work = self.scope.post_read(to, part);
                self.fly(work, Expect::Message(tag))?;
            }
            70..85 => return Ok(false),
            85..93 => {
                let Some(buffer) = self.words.pop() else { return Ok(false) };
                let (remote, add) = (self.at(COUNTER, 1), self.random.next());
                let work = self.scope.post(FetchAddWorkRequest::new(buffer, remote, add));
                self.fly(work, Expect::Found(self.counter))?;
                self.counter = self.counter.wrapping_add(add);
            }
            _ => {
                let Some(buffer) = self.words.pop() else { return Ok(false) };
                // Every other one compares with something else, and must not swap.
                let (remote, swap) = (self.at(SWAPPED, 1), self.random.next());
                let wrong = pick.is_multiple_of(2);
                let compare = self.swapped ^ u64::from(wrong);
                let work =
                    self.scope.post(CompareSwapWorkRequest::new(buffer, remote, compare, swap));
                self.fly(work, Expect::Found(self.swapped))?;
                if !wrong {
                    self.swapped = swap;
                }
            }
        }
        Ok(true)
    }

    fn take(&mut self) -> Option<Buffer<'s>> {
        let pick = self.random.below(self.idle.len().max(1) as u64) as usize;
        (pick < self.idle.len()).then(|| self.idle.swap_remove(pick))
    }

    /// Takes results that are there, and returns whether there were any.
    fn poll(&mut self) -> Result<bool, Leave> {
        let mut moved = false;
        while let Some((work, _)) = self.flying.front_mut()
            && let Some(ended) = work.poll()
        {
            ended?;
            let (work, expect) = self.flying.pop_front().unwrap();
            let (buffer, _) = work.wait()?;
            match expect {
                Expect::Nothing => {}
                Expect::Message(tag) => self.check(&buffer, self.streams[0], tag),
                Expect::Found(value) => assert_eq!(buffer[0], value, "what an atomic has found"),
            }
            let pool = if buffer.len() == 1 { &mut self.words } else { &mut self.idle };
            pool.push(buffer);
            self.tally.completed += 1;
            moved = true;
        }
        while let Some(work) = self.inline.front_mut()
            && let Some(ended) = work.poll()
        {
            ended?;
            self.inline.pop_front();
            self.tally.completed += 1;
            moved = true;
        }
        while let Some(work) = self.receives.front_mut()
            && let Some(ended) = work.poll()
        {
            ended?;
            let (buffer, told) = self.receives.pop_front().unwrap().wait()?;
            let (number, stream) = (self.received, self.streams[1]);
            let words = told.byte_len() as usize / 8;
            if told.opcode() == WorkOpcode::ReceiveWriteWithImmediate {
                let words = told.immediate().unwrap() as usize;
                let slot = SLOTS + number as usize % RECEIVES * LONGEST;
                self.check(&self.memory.slice(slot..slot + words)?.to_vec(), stream, number);
            } else {
                if let Some(immediate) = told.immediate() {
                    assert_eq!((immediate, words), (number as u32, 1));
                }
                self.check(&buffer[..words], stream, number);
            }
            self.received += 1;
            self.tally.messages += 1;
            self.tally.completed += 1;
            self.post_receive(buffer)?;
            moved = true;
        }
        Ok(moved)
    }

    /// Runs until `until`, and then until both have received everything; or until the connection is broken
    /// off, by us at `break_at`.
    fn run(&mut self, until: Instant, break_at: Option<Instant>) -> Result<(), Leave> {
        let mut moved_at = Instant::now();
        loop {
            let now = Instant::now();
            if break_at.is_some_and(|at| now >= at) {
                self.between.broken.store(true, Ordering::Release);
            }
            if self.between.broken.load(Ordering::Acquire) {
                return Err(Leave::BrokenOff);
            }
            let mut moved = self.poll()?;
            if now < until {
                moved |= self.post()?;
            } else if self.flying.is_empty() && self.inline.is_empty() {
                self.between.last[self.side].store(self.sent + 1, Ordering::Release);
                if self.between.last[1 - self.side].load(Ordering::Acquire) == self.received + 1 {
                    return Err(Leave::Finished);
                }
            }
            if moved {
                moved_at = now;
            } else {
                assert!(moved_at.elapsed() < PATIENCE, "nothing moves any more");
                thread::sleep(Duration::from_micros(100));
            }
        }
    }
}

/// One side of a connection, from its beginning to its end.
#[expect(clippy::too_many_arguments, reason = "they are one connection's")]
fn carry(
    channel: &mut Channel<'static>,
    side: usize,
    streams: [u64; 2],
    between: &Between,
    memory: &SharedMemoryRegion<'static, u64>,
    remote: RemoteMemoryRegion,
    random: &mut Random,
    (until, break_at): (Instant, Option<Instant>),
) -> Tally {
    let domain = memory.protection_domain();
    let mut incoming = domain.allocate::<u64>(RECEIVES * LONGEST).unwrap();
    let mut outgoing: Vec<MemoryRegion<'_, u64>> = Vec::new();
    for _ in 0..SENDS {
        // Short and long messages: as many of 2 to 4 words as of 1,024 to 2,048.
        let most = 2 << random.below(LONGEST.ilog2().into());
        outgoing.push(domain.allocate(2 + random.below(most - 1) as usize).unwrap());
    }
    let mut words = domain.allocate::<u64>(SENDS).unwrap();
    let mut tally = Tally::default();
    let left = channel.scope(|scope| {
        let mut end = End {
            scope,
            side,
            streams,
            between,
            memory,
            remote,
            random,
            tally: &mut tally,
            idle: Vec::new(),
            words: words.slice_mut(..)?.chunks(1)?.collect(),
            flying: VecDeque::new(),
            inline: VecDeque::new(),
            receives: VecDeque::new(),
            sent: 0,
            received: 0,
            counter: 0,
            swapped: 0,
        };
        for region in &mut outgoing {
            end.idle.push(region.slice_mut(..)?);
        }
        for part in incoming.slice_mut(..)?.chunks(LONGEST)? {
            end.post_receive(part)?;
        }
        let left = end.run(until, break_at);
        let receives = end.receives.len();
        end.tally.flushed += (end.flying.len() + end.inline.len() + receives) as u64;
        if let Err(Leave::Finished) = left {
            assert_eq!(receives, RECEIVES);
            assert_eq!(end.tally.flushed, RECEIVES as u64);
            assert_eq!(end.sent, between.last[side].load(Ordering::Acquire) - 1);
        }
        left
    });
    match left {
        Err(ScopeError::Closure(Leave::Finished)) => tally.finished += 1,
        Err(ScopeError::Closure(Leave::BrokenOff)) => tally.broken += 1,
        // The effect on the peer of breaking the connection off.
        Err(ScopeError::Closure(Leave::Failed(error)))
            if between.broken.load(Ordering::Acquire) && error.work_error().is_some() =>
        {
            tally.broken += 1;
        }
        other => panic!("side {side}: {other:?}"),
    }
    tally
}

/// Connects two channels again and again until `until`; each time they run random operations.
pub(crate) fn connection(
    sides: &(Side, Side),
    index: u64,
    mut random: Random,
    until: Instant,
) -> Tally {
    let builder = |side: &Side| {
        let builder = side.builder().max_send_wr(SENDS as u32).max_recv_wr(RECEIVES as u32);
        builder.max_ack_retries(MaxAckRetries::new(7).unwrap())
    };
    let (mut one, mut two) = connect(builder(&sides.0), builder(&sides.1));
    let memories = [&sides.0, &sides.1]
        .map(|side| SharedMemoryRegion::<u64>::new(&side.domain, WORDS, ALL).unwrap());
    let remotes = [memories[1].remote(), memories[0].remote()];
    let mut all = Tally::default();
    for round in 0_u64.. {
        let now = Instant::now();
        if round > 1 && now >= until {
            break;
        }
        memories.iter().for_each(|memory| memory.zero());
        // The first two rounds are one of each kind.
        let breaks = if round < 2 { round == 1 } else { random.below(2) == 0 };
        let ends = now + Duration::from_millis(100 + random.below(1200));
        let breaker = random.below(2) as usize;
        let times = [0, 1].map(|side| {
            if breaks && side == breaker { (ends + PATIENCE, Some(ends)) } else { (ends, None) }
        });
        let between = Between::default();
        // A stream never has the number of another round's.
        let stream = index << 12 | round << 1;
        let mut randoms = [random.next(), random.next()].map(Random::new);
        let [random_one, random_two] = &mut randoms;
        let tallies = thread::scope(|threads| {
            let (one, two, between, memories) = (&mut one, &mut two, &between, &memories);
            let (streams, remote) = ([stream, stream + 1], remotes[0]);
            let first = threads.spawn(move || {
                carry(one, 0, streams, between, &memories[0], remote, random_one, times[0])
            });
            let (streams, remote) = ([stream + 1, stream], remotes[1]);
            let second =
                carry(two, 1, streams, between, &memories[1], remote, random_two, times[1]);
            [first.join().unwrap(), second]
        });
        let ends = tallies.map(|tally| (tally.finished, tally.broken));
        assert_eq!(ends[0], ends[1], "one has finished what the other has not: {tallies:?}");
        tallies.into_iter().for_each(|tally| all.add(tally));
        all.finished -= ends[0].0;
        all.broken -= ends[0].1;
        (one, two) = reconnect(one, two);
    }
    all
}
