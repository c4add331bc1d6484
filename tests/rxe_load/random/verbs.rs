//! One connection of queue pairs, on the verbs layer, where every request has a unique number: each
//! posted number must come back once, completed or flushed.

use std::collections::{BTreeMap, VecDeque};
use std::thread;
use std::time::{Duration, Instant};

use ibverbs::{
    AccessFlags, CompletionQueue, MemoryRegion, QueuePair, Rc, SharedMemoryRegion, WorkCompletion,
    settings::{MaxAckRetries, MaxRnrRetries, MinRnrTimer},
};

use super::{Tally, word};
use crate::Random;
use crate::vm::PATIENCE;
use crate::vm::channels::{ALL, Side};

const DEPTH: usize = 8;
const LONGEST: usize = 1500;

#[derive(Clone, Copy, Debug)]
enum Request {
    /// Into this slot.
    Receive(usize),
    Send,
    Write,
    /// Reads the write of this number: the count of words, and the slot.
    Read(u64, usize, usize),
}

/// One of the two queue pairs.
struct End<'a> {
    queue_pair: QueuePair<'a>,
    queue: &'a CompletionQueue<'static>,
    /// A slot for each request of the send queue, one for each receive, and one for each read.
    outgoing: &'a mut MemoryRegion<'static, u64>,
    incoming: &'a mut MemoryRegion<'static, u64>,
    read: &'a mut MemoryRegion<'static, u64>,
    /// The memory that the peer writes to.
    area: &'a SharedMemoryRegion<'static, u64>,
    /// Requests that have not ended, by number.
    outstanding: BTreeMap<u64, Request>,
    /// How many requests of the send queue are outstanding, and how many were ever posted.
    sends: (usize, u64),
    /// How many receives are posted for which no message is on its way, and how many were ever posted.
    receives: (usize, u64),
    /// Messages that are on their way here: numbers and words.
    coming: VecDeque<(u64, usize)>,
}

impl End<'_> {
    fn post_receive(&mut self, number: u64, tally: &mut Tally) {
        let slot = self.receives.1 as usize % DEPTH;
        let range = slot * LONGEST..(slot + 1) * LONGEST;
        // SAFETY: receives complete in order, so the last one of this slot has; and the region outlives them
        // all.
        unsafe { self.queue_pair.post_receive(self.incoming, range, number).unwrap() };
        self.outstanding.insert(number, Request::Receive(slot));
        self.receives = (self.receives.0 + 1, self.receives.1 + 1);
        tally.posted += 1;
    }

    /// Fills the next slot of the send queue and returns its first word.
    fn fill(&mut self, number: u64, words: usize) -> usize {
        let first = self.sends.1 as usize % DEPTH * LONGEST;
        let slot = &mut self.outgoing[first..first + words];
        slot.iter_mut().enumerate().for_each(|(index, to)| *to = word(9, number, index));
        first
    }

    fn posted(&mut self, number: u64, request: Request, tally: &mut Tally) {
        self.outstanding.insert(number, request);
        self.sends = (self.sends.0 + 1, self.sends.1 + 1);
        tally.posted += 1;
    }

    /// Takes completions that are there. Once the connection is broken off, requests may fail.
    fn poll(&mut self, broken: bool, tally: &mut Tally) -> bool {
        let mut slots = [WorkCompletion::default(); 5];
        let found = self.queue.poll(&mut slots).unwrap();
        for completion in found {
            let number = completion.wr_id();
            let request = self.outstanding.remove(&number);
            let request = request.unwrap_or_else(|| panic!("{number} was not outstanding"));
            assert_eq!(completion.queue_pair_number(), self.queue_pair.number());
            if !matches!(request, Request::Receive(_)) {
                self.sends.0 -= 1;
            }
            let success = match completion.result() {
                Ok(success) => success,
                Err(error) => {
                    assert!(broken, "{request:?}: {error}");
                    tally.flushed += 1;
                    continue;
                }
            };
            tally.completed += 1;
            let check = |words: &[u64], number| {
                for (index, &found) in words.iter().enumerate() {
                    assert_eq!(found, word(9, number, index), "word {index} of {number}");
                }
                8 * words.len() as u64
            };
            match request {
                Request::Receive(slot) => {
                    let (number, words) = self.coming.pop_front().expect("nothing was sent");
                    assert_eq!(success.byte_len() as usize, 8 * words);
                    let first = slot * LONGEST;
                    tally.bytes += check(&self.incoming[first..first + words], number);
                    tally.messages += 1;
                }
                Request::Read(number, words, first) => {
                    tally.bytes += check(&self.read[first..first + words], number);
                }
                Request::Send | Request::Write => {}
            }
        }
        !found.is_empty()
    }
}

/// Posts something from `one` to `two`, if there is room.
fn post(
    one: &mut End<'_>,
    two: &mut End<'_>,
    next: &mut u64,
    random: &mut Random,
    tally: &mut Tally,
) -> bool {
    let mut number = || {
        *next += 1;
        *next - 1
    };
    let words = 1 + random.below(LONGEST as u64) as usize;
    let pick = random.below(10);
    let receives = two.outstanding.values().filter(|r| matches!(r, Request::Receive(_))).count();
    if pick < 4 && receives < DEPTH {
        two.post_receive(number(), tally);
        return true;
    }
    if one.sends.0 + 2 > DEPTH {
        return false;
    }
    let number_of_send = number();
    if pick < 7 {
        if two.receives.0 == 0 {
            return false;
        }
        let first = one.fill(number_of_send, words);
        // SAFETY: sends complete in order, so the last one of this slot has; the region outlives them all.
        unsafe { one.queue_pair.post_send(one.outgoing, first..first + words, number_of_send) }
            .unwrap();
        one.posted(number_of_send, Request::Send, tally);
        two.receives.0 -= 1;
        two.coming.push_back((number_of_send, words));
        return true;
    }
    // A read whose answer is lost or late is carried out again, so the next write to the area waits for it.
    if one.outstanding.values().any(|request| matches!(request, Request::Read(..))) {
        return false;
    }
    let remote = two.area.remote_range(..words).unwrap();
    let first = one.fill(number_of_send, words);
    // SAFETY: as above.
    unsafe {
        one.queue_pair.post_write(one.outgoing, first..first + words, remote, number_of_send)
    }
    .unwrap();
    one.posted(number_of_send, Request::Write, tally);
    let number_of_read = number();
    let first = one.sends.1 as usize % DEPTH * LONGEST;
    // SAFETY: as above.
    unsafe { one.queue_pair.post_read(one.read, first..first + words, remote, number_of_read) }
        .unwrap();
    one.posted(number_of_read, Request::Read(number_of_send, words, first), tally);
    true
}

/// Connects two queue pairs again and again until `until`.
pub(crate) fn connection(sides: &(Side, Side), mut random: Random, until: Instant) -> Tally {
    let queues = [&sides.0, &sides.1]
        .map(|side| CompletionQueue::new(&side.context, 2 * DEPTH as u32).unwrap());
    let sides = [&sides.0, &sides.1];
    let region = |side: &Side| MemoryRegion::<u64>::new(&side.domain, DEPTH * LONGEST).unwrap();
    let mut regions = sides.map(|side| [region(side), region(side), region(side)]);
    let areas =
        sides.map(|side| SharedMemoryRegion::<u64>::new(&side.domain, LONGEST, ALL).unwrap());
    let (mut all, mut next) = (Tally::default(), 0);
    for round in 0.. {
        let now = Instant::now();
        if round > 1 && now >= until {
            break;
        }
        let prepared = [0, 1].map(|side| {
            let domain = &sides[side].domain;
            domain
                .create_qp(&queues[side], &queues[side], Rc)
                .max_send_wr(DEPTH as u32)
                .max_recv_wr(DEPTH as u32)
                .access(AccessFlags::REMOTE_READ | AccessFlags::REMOTE_WRITE)
                .max_ack_retries(MaxAckRetries::new(7).unwrap())
                .max_rnr_retries(MaxRnrRetries::UNLIMITED)
                .min_rnr_timer(MinRnrTimer::SHORTEST)
                .build()
                .unwrap()
        });
        let [endpoint_one, endpoint_two] = [prepared[0].endpoint(), prepared[1].endpoint()];
        let [one, two] = prepared;
        let pairs = [one.handshake(endpoint_two).unwrap(), two.handshake(endpoint_one).unwrap()];
        let mut ends = pairs.into_iter().zip(&queues).zip(&mut regions).zip(&areas).map(
            |(((queue_pair, queue), [outgoing, incoming, read]), area)| End {
                queue_pair,
                queue,
                outgoing,
                incoming,
                read,
                area,
                outstanding: BTreeMap::new(),
                sends: (0, 0),
                receives: (0, 0),
                coming: VecDeque::new(),
            },
        );
        let (mut one, mut two) = (ends.next().unwrap(), ends.next().unwrap());
        let stop = now + Duration::from_millis(100 + random.below(900));
        while Instant::now() < stop {
            let mut moved = one.poll(false, &mut all) | two.poll(false, &mut all);
            moved |= post(&mut one, &mut two, &mut next, &mut random, &mut all);
            moved |= post(&mut two, &mut one, &mut next, &mut random, &mut all);
            if !moved {
                thread::sleep(Duration::from_micros(100));
            }
        }
        let breaks = if round < 2 { round == 1 } else { random.below(2) == 0 };
        let patience = Instant::now() + PATIENCE;
        // In a regular end, all messages arrive before the remaining requests are flushed, which are receives
        // only.
        while !breaks && one.sends.0 + two.sends.0 + one.coming.len() + two.coming.len() > 0 {
            one.poll(false, &mut all);
            two.poll(false, &mut all);
            assert!(Instant::now() < patience, "{:?} {:?}", one.outstanding, two.outstanding);
            thread::sleep(Duration::from_micros(100));
        }
        one.queue_pair.to_error().unwrap();
        two.queue_pair.to_error().unwrap();
        while !(one.outstanding.is_empty() && two.outstanding.is_empty()) {
            one.poll(true, &mut all);
            two.poll(true, &mut all);
            assert!(Instant::now() < patience, "{:?} {:?}", one.outstanding, two.outstanding);
            thread::sleep(Duration::from_micros(100));
        }
        assert_eq!(all.posted, all.completed + all.flushed, "round {round}");
        if breaks {
            all.broken += 1;
        } else {
            all.finished += 1;
        }
        one.queue_pair.close().unwrap();
        two.queue_pair.close().unwrap();
        // Every completion belonged to a request, so none is left.
        for queue in &queues {
            assert!(queue.poll(&mut [WorkCompletion::default()]).unwrap().is_empty());
        }
    }
    all
}
