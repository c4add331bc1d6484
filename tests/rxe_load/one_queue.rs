//! One queue pair with a sending and a receiving thread, and one completion queue with four threads.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use ibverbs::operation::{ReceiveHalf, SendHalf};
use ibverbs::{
    CompletionQueue, ProtectionDomain, QueuePair, Rc, WorkCompletion, WorkStatus,
    settings::{MaxRnrRetries, MinRnrTimer},
};

use crate::alone;
use crate::figures::figure;
use crate::vm::assert_nothing_left;

const DEPTH: usize = 16;

/// Reliable, with this many requests of each kind, and connected to itself.
fn loopback<'a>(
    domain: &'a ProtectionDomain<'a>,
    sends: &'a CompletionQueue<'a>,
    receives: &'a CompletionQueue<'a>,
) -> QueuePair<'a> {
    let prepared = domain
        .create_qp(sends, receives, Rc)
        .max_send_wr(DEPTH as u32)
        .max_recv_wr(DEPTH as u32)
        .max_rnr_retries(MaxRnrRetries::UNLIMITED)
        .min_rnr_timer(MinRnrTimer::SHORTEST)
        .build()
        .unwrap();
    let itself = prepared.endpoint();
    prepared.handshake(itself).unwrap()
}

/// How many times each number was seen, by the status of its completion.
#[derive(Default)]
struct Seen {
    completed: BTreeMap<u64, u32>,
    flushed: BTreeMap<u64, u32>,
}

impl Seen {
    fn add(&mut self, completion: &WorkCompletion) {
        let ended = match completion.result() {
            Ok(_) => &mut self.completed,
            Err(error) if error.status() == WorkStatus::Flushed => &mut self.flushed,
            Err(error) => panic!("{:#x}: {error}", completion.wr_id()),
        };
        *ended.entry(completion.wr_id()).or_default() += 1;
    }

    fn merge(&mut self, other: Self) {
        for (to, from) in
            [(&mut self.completed, other.completed), (&mut self.flushed, other.flushed)]
        {
            from.into_iter().for_each(|(id, times)| *to.entry(id).or_default() += times);
        }
    }

    /// Each number from 0 on was seen once, with either status.
    fn assert_once(&self, posted: u64, what: &str) {
        for id in 0..posted {
            let times = [&self.completed, &self.flushed].map(|ended| ended.get(&id).unwrap_or(&0));
            assert_eq!(times.into_iter().sum::<u32>(), 1, "{what} {id} of {posted}: {times:?}");
        }
        let seen = self.completed.len() + self.flushed.len();
        assert_eq!(seen as u64, posted, "{what}: more than was posted");
    }
}

/// A queue to poll. The wait between two polls leaves the two processors to the other threads.
fn poll_or_yield<'c>(
    queue: &CompletionQueue<'_>,
    slots: &'c mut [WorkCompletion],
) -> &'c [WorkCompletion] {
    let found = queue.poll(slots).unwrap().len();
    if found == 0 {
        thread::sleep(Duration::from_micros(50));
    }
    &slots[..found]
}

/// Sends `messages`, each with its number in it, `DEPTH` at a time. Returns the statuses.
fn send_all(
    mut half: SendHalf<'_, '_>,
    domain: &ProtectionDomain<'_>,
    queue: &CompletionQueue<'_>,
    messages: u64,
) -> Seen {
    let mut regions: Vec<_> = (0..DEPTH).map(|_| domain.allocate::<u64>(8).unwrap()).collect();
    let (mut seen, mut posted, mut ended) = (Seen::default(), 0, 0);
    let mut slots = [WorkCompletion::default(); 4];
    while ended < messages {
        while posted < messages && posted - ended < DEPTH as u64 {
            let region = &mut regions[posted as usize % DEPTH];
            region.fill(posted.wrapping_mul(0x0101_0101_0101_0101));
            // SAFETY: sends complete in order, so the earlier send of this region has ended. The regions
            // outlive all of them.
            unsafe { half.post_send(region, .., posted).unwrap() };
            posted += 1;
        }
        for completion in poll_or_yield(queue, &mut slots) {
            seen.add(completion);
            ended += 1;
        }
    }
    seen
}

/// Receives `messages`, in order.
fn receive_all(
    mut half: ReceiveHalf<'_, '_>,
    domain: &ProtectionDomain<'_>,
    queue: &CompletionQueue<'_>,
    messages: u64,
) -> Seen {
    let mut regions: Vec<_> = (0..DEPTH).map(|_| domain.allocate::<u64>(8).unwrap()).collect();
    let (mut seen, mut posted, mut ended) = (Seen::default(), 0, 0);
    let mut slots = [WorkCompletion::default(); 4];
    while ended < messages {
        while posted < messages && posted - ended < DEPTH as u64 {
            let region = &mut regions[posted as usize % DEPTH];
            // SAFETY: receives complete in order, so the earlier receive of this region has ended and was
            // compared. The regions outlive all of them.
            unsafe { half.post_receive(region, .., posted).unwrap() };
            posted += 1;
        }
        for completion in poll_or_yield(queue, &mut slots) {
            let number = completion.wr_id();
            assert_eq!(number, ended, "receives end in order");
            seen.add(completion);
            let expected = number.wrapping_mul(0x0101_0101_0101_0101);
            let region = &regions[number as usize % DEPTH];
            assert!(region.iter().all(|&word| word == expected), "message {number}");
            ended += 1;
        }
    }
    seen
}

#[test]
fn two_threads_on_the_halves_of_one_queue_pair() {
    const MESSAGES: u64 = 5000;
    let _alone = alone("two halves", 150);
    let start = Instant::now();
    {
        let context = ibverbs::open("rxe0").unwrap();
        let domain = context.alloc_pd().unwrap();
        let sends = context.create_cq(DEPTH as u32).unwrap();
        let receives = context.create_cq(DEPTH as u32).unwrap();
        let mut queue_pair = loopback(&domain, &sends, &receives);
        let (send, receive) = queue_pair.split();
        let (sent, received) = thread::scope(|scope| {
            let sent = scope.spawn(|| send_all(send, &domain, &sends, MESSAGES));
            let received = receive_all(receive, &domain, &receives, MESSAGES);
            (sent.join().unwrap(), received)
        });
        sent.assert_once(MESSAGES, "send");
        received.assert_once(MESSAGES, "receive");
        assert!(sent.flushed.is_empty() && received.flushed.is_empty());
    }
    assert_nothing_left("rxe0");
    figure(
        "two-halves",
        &format!(
            "a thread that sends, a thread that receives: {MESSAGES} messages posted, {MESSAGES} sends \
             and {MESSAGES} receives completed, each once and in order, every word right, in {:.1?}; \
             resources at baseline",
            start.elapsed()
        ),
    );
}

/// Four queue pairs whose completions all go to one queue, from which four threads take them.
#[test]
fn four_threads_poll_one_queue() {
    const PAIRS: usize = 4;
    const POLLERS: usize = 4;
    const MESSAGES: u64 = 1500;
    let _alone = alone("four pollers", 150);
    let start = Instant::now();
    let (mut completed, mut flushed, mut posted) = (0, 0, 0);
    let mut shares = Vec::new();
    {
        let context = ibverbs::open("rxe0").unwrap();
        let domain = context.alloc_pd().unwrap();
        let queue = context.create_cq((2 * PAIRS * DEPTH) as u32).unwrap();
        let mut pairs: Vec<_> = (0..PAIRS).map(|_| loopback(&domain, &queue, &queue)).collect();
        let source = domain.allocate::<u8>(64).unwrap();
        // Sends have even numbers, and receives odd ones; the pair is in the upper 32 bits.
        let ended: Vec<_> = (0..PAIRS).map(|_| AtomicU64::new(0)).collect();
        let total = AtomicU64::new(0);
        let expected = PAIRS as u64 * (2 * MESSAGES + DEPTH as u64);
        thread::scope(|scope| {
            let pollers: Vec<_> = (0..POLLERS)
                .map(|_| {
                    scope.spawn(|| {
                        let mut seen = Seen::default();
                        let mut slots = [WorkCompletion::default(); 3];
                        while total.load(Ordering::Acquire) < expected {
                            for completion in poll_or_yield(&queue, &mut slots) {
                                seen.add(completion);
                                let pair = (completion.wr_id() >> 32) as usize;
                                ended[pair].fetch_add(1, Ordering::Release);
                                total.fetch_add(1, Ordering::Release);
                            }
                        }
                        seen
                    })
                })
                .collect();
            let (source, ended) = (&source, &ended);
            for (index, pair) in pairs.iter_mut().enumerate() {
                let domain = &domain;
                scope.spawn(move || {
                    let mut sink = domain.allocate::<u8>(64).unwrap();
                    let name = |n: u64| (index as u64) << 32 | n;
                    for message in 0..MESSAGES {
                        // Half of each queue stays free, so that none is ever full.
                        while 2 * message - ended[index].load(Ordering::Acquire) > DEPTH as u64 {
                            thread::sleep(Duration::from_micros(50));
                        }
                        // SAFETY: every request is waited for below, and nobody reads the regions before.
                        unsafe {
                            pair.post_receive(&mut sink, .., name(2 * message + 1)).unwrap();
                            pair.post_send(source, .., name(2 * message)).unwrap();
                        }
                    }
                    while ended[index].load(Ordering::Acquire) < 2 * MESSAGES {
                        thread::sleep(Duration::from_micros(50));
                    }
                    // Requests in flight when the queue pair fails are flushed, and complete too.
                    for more in 0..DEPTH as u64 {
                        // SAFETY: as above.
                        unsafe { pair.post_receive(&mut sink, .., name(2 * MESSAGES + more)) }
                            .unwrap();
                    }
                    pair.to_error().unwrap();
                    while ended[index].load(Ordering::Acquire) < 2 * MESSAGES + DEPTH as u64 {
                        thread::sleep(Duration::from_micros(50));
                    }
                });
            }
            let mut all = Seen::default();
            for poller in pollers {
                let seen = poller.join().unwrap();
                shares.push(seen.completed.len() + seen.flushed.len());
                all.merge(seen);
            }
            // Numbers count on, whatever the pair.
            let per_pair = 2 * MESSAGES + DEPTH as u64;
            let flat = |ids: &BTreeMap<u64, u32>| {
                ids.iter().map(|(id, n)| ((id >> 32) * per_pair + (id & 0xffff_ffff), *n)).collect()
            };
            let all = Seen { completed: flat(&all.completed), flushed: flat(&all.flushed) };
            all.assert_once(expected, "request");
            assert_eq!(all.completed.len() as u64, PAIRS as u64 * 2 * MESSAGES);
            (completed, flushed, posted) = (all.completed.len(), all.flushed.len(), expected);
        });
        assert!(queue.poll(&mut [WorkCompletion::default()]).unwrap().is_empty());
    }
    assert_nothing_left("rxe0");
    assert!(shares.iter().all(|&share| share > 0), "or this tests nothing: {shares:?}");
    figure(
        "four-pollers",
        &format!(
            "{POLLERS} threads poll one queue of {PAIRS} queue pairs: {posted} posted = {completed} \
             completed + {flushed} flushed, each found once, by shares of {shares:?}, in {:.1?}; \
             resources at baseline",
            start.elapsed()
        ),
    );
}
