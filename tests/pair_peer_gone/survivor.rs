//! The survivor.

use std::collections::VecDeque;
use std::thread;
use std::time::{Duration, Instant};

use ibverbs::channel::ChannelClosed;
use ibverbs::{
    Channel, MemoryRegion, ProtectionDomain, QueuePairEndpoint, QueuePairState, Rc,
    RemoteMemoryRegion, TransportError, WorkCompletion, WorkStatus, completion::WorkError,
    settings::MaxRnrRetries,
};

use crate::two_machines::{PATIENCE, Peer, assert_nothing_left, completions, pattern, report};
use crate::{ACK_RETRIES, ACK_TIMEOUT, ENOUGH, LENGTH, REACHED, SLOTS, WINDOW, retry_time};

/// An operation, by its number: three messages, then a read, and so on.
#[derive(Clone, Copy)]
enum Operation {
    Message(usize),
    Read { slot: usize },
}

fn operation(number: usize) -> Operation {
    match number % 4 {
        3 => Operation::Read { slot: number / 4 % SLOTS },
        _ => Operation::Message(messages(number)),
    }
}

/// The number of messages among `operations` operations.
fn messages(operations: usize) -> usize {
    operations - operations / 4
}

/// The result of a transfer.
struct Progress {
    acknowledged: usize,
    last: Instant,
    /// The first failure, and its time after the last success.
    failure: Option<(WorkError, Duration)>,
    flushed: usize,
}

impl Progress {
    fn new() -> Self {
        Self { acknowledged: 0, last: Instant::now(), failure: None, flushed: 0 }
    }

    fn ended(&mut self, result: Result<(), WorkError>) {
        match (result, self.failure) {
            (Ok(()), None) => {
                self.acknowledged += 1;
                self.last = Instant::now();
                if self.acknowledged == ENOUGH {
                    println!("{REACHED}");
                }
            }
            (Err(error), None) => self.failure = Some((error, self.last.elapsed())),
            (Err(error), Some(_)) => {
                assert_eq!(error.status(), WorkStatus::Flushed);
                self.flushed += 1;
            }
            (Ok(()), Some(_)) => panic!("a success after a failure"),
        }
    }
}

/// Connects, transfers until that fails, and checks the result.
pub(crate) fn survive(layer: &str, witness: bool) {
    let (progress, posted, dropped, sink) = {
        let context = ibverbs::open("rxe1").unwrap();
        let domain = context.alloc_pd().unwrap();
        let mut source = domain.allocate::<u64>(WINDOW * LENGTH).unwrap();
        let mut sink = domain.allocate::<u64>(SLOTS * LENGTH).unwrap();
        let (progress, posted, dropped) = match layer {
            "verbs" => over_verbs(&domain, &mut source, &mut sink),
            _ => over_channel(&domain, &mut source, &mut sink),
        };
        (progress, posted, dropped, sink.to_vec())
    };
    let Progress { acknowledged, failure, flushed, .. } = progress;
    let (error, silence) = failure.unwrap();

    assert!(acknowledged >= ENOUGH / 2, "{acknowledged} operations: it was not in mid-transfer");
    assert_eq!(error.status(), WorkStatus::RetryExceeded);
    let (configured, bound) = (retry_time(), 4 * retry_time());
    // The last answer may have been seen here after the victim began to measure.
    assert!(silence >= configured / 2, "{silence:?}");
    assert!(silence <= bound + PATIENCE, "{silence:?}");
    assert_eq!(flushed, posted - acknowledged - 1, "all the others of the window, and all later");

    let reads = intact_reads(&sink, acknowledged, posted);
    if witness {
        let mut peer = Peer::meet(18516);
        let intact: bool = peer.exchange(messages(acknowledged));
        assert!(intact, "what was acknowledged did not arrive");
    }
    assert_nothing_left("rxe1");
    report(&format!(
        "{layer}: RetryExceeded {:.2} s after the last answer (configured {:.2} s, bound {:.2} s); the \
         {flushed} operations after it flushed; {} acknowledged messages{} and {reads} reads intact; \
         dropped in {dropped:.0?}; resources at baseline",
        silence.as_secs_f64(),
        configured.as_secs_f64(),
        bound.as_secs_f64(),
        messages(acknowledged),
        if witness { " all there at the victim" } else { "" },
    ));
}

/// The number of slots that hold what was read into them: those of acknowledged reads to which no later read
/// was posted.
fn intact_reads(sink: &[u64], acknowledged: usize, posted: usize) -> usize {
    let slot = |number| match operation(number) {
        Operation::Read { slot } => Some(slot),
        Operation::Message(_) => None,
    };
    let lost: Vec<_> = (acknowledged..posted).filter_map(slot).collect();
    let mut slots: Vec<_> = (0..acknowledged).filter_map(slot).collect();
    slots.sort_unstable();
    slots.dedup();
    slots.retain(|slot| !lost.contains(slot));
    for &slot in &slots {
        assert!(is_slot(&sink[slot * LENGTH..][..LENGTH], slot), "slot {slot}");
    }
    slots.len()
}

/// Whether this is what the victim has there.
fn is_slot(numbers: &[u64], slot: usize) -> bool {
    (0..LENGTH).all(|index| numbers[index] == !pattern(slot as u64, index))
}

fn fill(numbers: &mut [u64], message: usize) {
    for (index, number) in numbers.iter_mut().enumerate() {
        *number = pattern(message as u64, index);
    }
}

fn part(remote: RemoteMemoryRegion, slot: usize) -> RemoteMemoryRegion {
    let bytes = (LENGTH * size_of::<u64>()) as u64;
    remote.sub_region(slot as u64 * bytes, bytes).unwrap()
}

/// Returns the result, the number of posted operations, and how long dropping the queue pair took.
fn over_verbs(
    domain: &ProtectionDomain<'_>,
    source: &mut MemoryRegion<'_, u64>,
    sink: &mut MemoryRegion<'_, u64>,
) -> (Progress, usize, Duration) {
    let queue = domain.context().create_cq(2 * WINDOW as u32).unwrap();
    let prepared = domain
        .create_qp(&queue, &queue, Rc)
        .max_send_wr(WINDOW as u32)
        .ack_timeout(ACK_TIMEOUT)
        .max_ack_retries(ACK_RETRIES)
        .max_rnr_retries(MaxRnrRetries::UNLIMITED)
        .build()
        .unwrap();
    let mut peer = Peer::meet(18515);
    let (remote, readable): (QueuePairEndpoint, RemoteMemoryRegion) =
        peer.exchange(prepared.endpoint());
    let mut pair = prepared.handshake(remote).unwrap();

    let start = Instant::now();
    let mut progress = Progress::new();
    let (mut posted, mut completed) = (0, 0);
    let mut found = [WorkCompletion::default(); WINDOW];
    while progress.failure.is_none() || completed < posted {
        while progress.failure.is_none() && posted < completed + WINDOW {
            let wr_id = posted as u64;
            match operation(posted) {
                Operation::Message(message) => {
                    let from = posted % WINDOW * LENGTH;
                    fill(&mut source[from..][..LENGTH], message);
                    // SAFETY: the regions outlive the queue pair, and a part of one is not used
                    // again before its operation has completed.
                    unsafe { pair.post_send(source, from..from + LENGTH, wr_id).unwrap() };
                }
                Operation::Read { slot } => {
                    let range = slot * LENGTH..(slot + 1) * LENGTH;
                    // SAFETY: as above.
                    unsafe { pair.post_read(sink, range, part(readable, slot), wr_id).unwrap() };
                }
            }
            posted += 1;
        }
        for completion in queue.poll(&mut found).unwrap() {
            assert_eq!(completion.wr_id(), completed as u64, "in order");
            progress.ended(completion.result().map(drop));
            if let (Operation::Read { slot }, None) = (operation(completed), progress.failure) {
                assert!(is_slot(&sink[slot * LENGTH..][..LENGTH], slot), "slot {slot}");
            }
            completed += 1;
        }
        assert!(start.elapsed() < 2 * PATIENCE, "{completed} of {posted} completions");
        thread::sleep(Duration::from_micros(50));
    }
    assert_eq!(pair.state().unwrap(), QueuePairState::Error);
    // What is posted now is flushed as well.
    // SAFETY: as above.
    unsafe { pair.post_send(source, ..LENGTH, posted as u64).unwrap() };
    posted += 1;
    let completion = completions(&queue, 1)[0];
    progress.ended(completion.result().map(drop));
    let start = Instant::now();
    pair.close().unwrap();
    (progress, posted, start.elapsed())
}

/// Does the same as [`over_verbs`], with a channel.
fn over_channel(
    domain: &ProtectionDomain<'_>,
    source: &mut MemoryRegion<'_, u64>,
    sink: &mut MemoryRegion<'_, u64>,
) -> (Progress, usize, Duration) {
    let prepared = Channel::builder(domain)
        .max_send_wr(WINDOW as u32)
        .max_recv_wr(1)
        .ack_timeout(ACK_TIMEOUT)
        .max_ack_retries(ACK_RETRIES)
        .max_rnr_retries(MaxRnrRetries::UNLIMITED)
        .build()
        .unwrap();
    let mut peer = Peer::meet(18515);
    let (remote, readable): (QueuePairEndpoint, RemoteMemoryRegion) =
        peer.exchange(prepared.endpoint());
    let mut channel = prepared.handshake(remote).unwrap();

    let deadline = Instant::now() + 2 * PATIENCE;
    let mut progress = Progress::new();
    let mut posted = 0;
    let ended = channel.manual_scope(|scope| {
        let mut idle: VecDeque<_> = source.slice_mut(..)?.chunks(LENGTH)?.collect();
        let mut slots: Vec<_> = sink.slice_mut(..)?.chunks(LENGTH)?.map(Some).collect();
        let mut flying = VecDeque::with_capacity(WINDOW);
        loop {
            while progress.failure.is_none() && flying.len() < WINDOW {
                let operation = operation(posted);
                let work = match operation {
                    Operation::Message(message) => {
                        let mut buffer = idle.pop_front().unwrap();
                        fill(&mut buffer, message);
                        scope.post_send(buffer)?
                    }
                    Operation::Read { slot } => {
                        scope.post_read(slots[slot].take().unwrap(), part(readable, slot))?
                    }
                };
                flying.push_back((operation, work));
                posted += 1;
            }
            let Some((operation, work)) = flying.pop_front() else { return Ok(()) };
            match work.wait_until(deadline) {
                Ok((buffer, _)) => {
                    progress.ended(Ok(()));
                    match operation {
                        Operation::Message(_) => idle.push_back(buffer),
                        Operation::Read { slot } => {
                            assert!(is_slot(&buffer, slot), "slot {slot}");
                            slots[slot] = Some(buffer);
                        }
                    }
                }
                Err(TransportError::Work(error)) => progress.ended(Err(error)),
                Err(error) => return Err(error),
            }
        }
    });
    assert_eq!(ended, Ok(()));
    let later = channel.until(deadline).send(source.slice(..LENGTH).unwrap()).unwrap_err();
    assert!(later.is_consequence(), "{later}");
    progress.ended(Err(later.work_error().unwrap()));
    posted += 1;
    let start = Instant::now();
    assert_eq!(channel.close().unwrap(), ChannelClosed::Drained);
    (progress, posted, start.elapsed())
}
