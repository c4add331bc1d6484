//! Measurements on the lean device: the cost of this crate alone.

use std::collections::BTreeMap;
use std::error::Error;
use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ibverbs::channel::PreparedChannel;
use ibverbs::completion::CompletionFields;
use ibverbs::{
    Channel, CompletionQueue, Loop, MemoryRegion, PooledBuffer, PreparedQueuePair,
    ProtectionDomain, QueuePair, Rc, SendWorkRequest, TransportError, WorkCompletion,
    operation::PreparedRequest,
};

use crate::c::{Handles, c_tuned_w19};
use crate::reactor::{ReactorRig, sends};
use crate::rig::{LENGTH, Rig, WINDOW, context};
use crate::{allocator, connection, doublings, point, queue_pairs, steps};

/// How often each is measured. Those that are compared take turns, so that other work of the machine at some
/// moment does not fall on one of them alone.
const ROUNDS: usize = 101;

pub(crate) fn measure() -> Result<(), Box<dyn Error>> {
    poll()?;
    outstanding()?;
    channels()?;
    making()?;
    connections()
}

const THE_CRATE: &str = "the crate, on a device of functions";

/// The shortest time in ns of each of several contenders, by number.
#[derive(Default)]
struct Shortest(BTreeMap<usize, f64>);

impl Shortest {
    fn note(&mut self, number: usize, took: Duration, things: usize) {
        let least = self.0.entry(number).or_insert(f64::INFINITY);
        *least = least.min(took.as_secs_f64() * 1e9 / things as f64);
    }

    fn print(self, chart: &str, series: &str) {
        for (number, ns) in self.0 {
            point(chart, series, number, ns);
        }
    }
}

/// The number of completions in the queue when polling begins.
const COMPLETIONS: usize = 4096;

fn prepared(
    domain: &Arc<ProtectionDomain<'static>>,
    queue: &Arc<CompletionQueue<'static>>,
    depth: usize,
) -> ibverbs::Result<PreparedQueuePair<'static>> {
    QueuePair::builder(domain, queue, queue, Rc).max_send_wr(depth as u32).max_recv_wr(1).build()
}

/// A queue pair that is connected to itself.
fn queue_pair(
    domain: &Arc<ProtectionDomain<'static>>,
    queue: &Arc<CompletionQueue<'static>>,
    depth: usize,
) -> ibverbs::Result<QueuePair<'static>> {
    let prepared = prepared(domain, queue, depth)?;
    let itself = prepared.endpoint();
    Ok(prepared.handshake(itself)?)
}

/// The cost of a completion by the number of completions per poll.
fn poll() -> Result<(), Box<dyn Error>> {
    let context = context();
    let domain = Arc::new(ProtectionDomain::new(&context)?);
    let region = MemoryRegion::<u8>::new(&domain, LENGTH)?;
    let elements = [region.gather_element(..)?];
    let mut request = PreparedRequest::new(SendWorkRequest::new(&elements), 0)?;
    let entries = COMPLETIONS as u32;
    let queue = Arc::new(CompletionQueue::new(&context, entries)?);
    let mut plain = queue_pair(&domain, &queue, COMPLETIONS)?;
    let mut completions = vec![WorkCompletion::default(); COMPLETIONS];
    let fields = CompletionFields::BYTE_LEN;
    let extended_queue = CompletionQueue::builder(&context, entries).extended(fields).build()?;
    let extended_queue = Arc::new(extended_queue);
    let mut extended = queue_pair(&domain, &extended_queue, COMPLETIONS)?;
    let mut poller = extended_queue.extended_poller()?;

    let mut fill = |queue_pair: &mut QueuePair<'static>| {
        (0..COMPLETIONS as u64).try_for_each(|wr_id| {
            // SAFETY: the region lives on, and nobody writes it.
            unsafe { queue_pair.post_prepared(&mut request, wr_id) }
        })
    };
    let (mut by_plain, mut by_extended) = (Shortest::default(), Shortest::default());
    for batch in (0..ROUNDS).flat_map(|_| doublings(1, 1024)) {
        fill(&mut plain)?;
        let (mut left, mut sum) = (COMPLETIONS, 0);
        let start = Instant::now();
        while left > 0 {
            let found = queue.poll(&mut completions[..batch])?;
            for completion in found {
                completion.result()?;
                sum += completion.wr_id();
            }
            left -= found.len();
        }
        by_plain.note(batch, start.elapsed(), COMPLETIONS);

        fill(&mut extended)?;
        let mut left = COMPLETIONS;
        let start = Instant::now();
        while left > 0 {
            left -= poller.poll(|completions| {
                let mut count = 0;
                while count < batch
                    && let Some(completion) = completions.next()?
                {
                    completion.result()?;
                    sum += completion.wr_id();
                    count += 1;
                }
                Ok::<_, Box<dyn Error>>(count)
            })?;
        }
        by_extended.note(batch, start.elapsed(), COMPLETIONS);
        black_box(sum);
    }
    by_plain.print("poll", "CompletionQueue::poll");
    by_extended.print("poll", "ExtendedPoller::poll");
    Ok(())
}

/// The cost of an operation by the number of others outstanding.
fn outstanding() -> Result<(), Box<dyn Error>> {
    const OPERATIONS: usize = 1 << 14;
    const MOST: usize = 4096;
    let context = context();
    let domain = Arc::new(ProtectionDomain::new(&context)?);
    let region = MemoryRegion::<u8>::new(&domain, LENGTH)?;
    let elements = [region.gather_element(..)?];
    let mut request = PreparedRequest::new(SendWorkRequest::new(&elements), 0)?;
    let queue = Arc::new(CompletionQueue::new(&context, MOST as u32 + 1)?);
    let mut queue_pair = queue_pair(&domain, &queue, MOST + 1)?;
    let mut completions = [WorkCompletion::default()];
    let prepared = Channel::builder(&domain).max_send_wr(MOST as u32 + 1).build()?;
    let itself = prepared.endpoint();
    let mut channel = prepared.handshake(itself)?;
    let message = region.slice(..)?;

    let mut by_queue_pair = Shortest::default();
    let turns = || (0..ROUNDS).flat_map(|_| doublings(1, MOST));
    for depth in turns() {
        // SAFETY: the region lives on, and nobody writes it.
        let mut post = |wr_id| unsafe { queue_pair.post_prepared(&mut request, wr_id) };
        (0..depth as u64).try_for_each(&mut post)?;
        let mut complete = || match queue.poll(&mut completions)? {
            [completion] => Ok::<_, Box<dyn Error>>(completion.result()?.byte_len()),
            _ => Err("a completion is missing".into()),
        };
        let start = Instant::now();
        for wr_id in 0..OPERATIONS as u64 {
            black_box(complete()?);
            post(wr_id)?;
        }
        by_queue_pair.note(depth, start.elapsed(), OPERATIONS);
        for _ in 0..depth {
            complete()?;
        }
    }
    by_queue_pair.print("outstanding", "QueuePair::post and poll");
    let mut by_scope = Shortest::default();
    channel.scope(|scope| {
        let mut handles = Vec::with_capacity(MOST);
        for depth in turns() {
            for _ in 0..depth {
                handles.push(scope.post_send(message)?);
            }
            let start = Instant::now();
            for operation in 0..OPERATIONS {
                let handle = &mut handles[operation & (depth - 1)];
                let oldest = std::mem::replace(handle, scope.post_send(message)?);
                black_box(oldest.wait()?.1.byte_len());
            }
            by_scope.note(depth, start.elapsed(), OPERATIONS);
            for handle in handles.drain(..) {
                handle.wait()?;
            }
        }
        Ok::<_, ibverbs::TransportError>(())
    })?;
    by_scope.print("outstanding", "Scope::post_send and wait");
    Ok(())
}

/// The cost of a future by the number of channels of its reactor, each of which sends in turn; beside it, sends on as
/// many queue pairs with one completion queue.
fn channels() -> Result<(), Box<dyn Error>> {
    const OPERATIONS: usize = 20_000;
    const MOST: usize = 10_000;
    let context = context();
    let domain = Arc::new(ProtectionDomain::new(&context)?);
    let region = MemoryRegion::<u8>::new(&domain, MOST * LENGTH)?;
    let queue = Arc::new(CompletionQueue::new(&context, MOST as u32)?);
    let pairs = (0..MOST).map(|_| queue_pair(&domain, &queue, 1));
    let mut pairs = pairs.collect::<Result<Vec<_>, _>>()?;
    let mut completions = [WorkCompletion::default(); WINDOW];
    let counts: Vec<_> = steps(MOST).collect();
    let mut rigs: Vec<_> = counts.iter().map(|&count| ReactorRig::new(count)).collect();
    let (mut by_pairs, mut by_channels) = (Shortest::default(), Shortest::default());
    for _ in 0..ROUNDS {
        for (&count, rig) in counts.iter().zip(&mut rigs) {
            let start = Instant::now();
            black_box(sends(rig, OPERATIONS as u64)?);
            by_channels.note(count, start.elapsed(), OPERATIONS);

            let turns = OPERATIONS.div_ceil(count);
            let mut sum = 0;
            let start = Instant::now();
            for _ in 0..turns {
                for (place, pair) in pairs[..count].iter_mut().enumerate() {
                    let message = place * LENGTH..(place + 1) * LENGTH;
                    // SAFETY: the region lives on, and nobody writes it.
                    unsafe { pair.post_send(&region, message, place as u64)? };
                }
                while let found @ [_, ..] = queue.poll(&mut completions)? {
                    for completion in found {
                        sum += completion.result()?.byte_len();
                    }
                }
            }
            by_pairs.note(count, start.elapsed(), turns * count);
            black_box(sum);
        }
    }
    by_channels.print("channels", "AsyncChannel::send, on one reactor");
    by_pairs.print("channels", "QueuePair::post_send, and one queue to poll");
    Ok(())
}

/// The time to make one more channel, to connect it to itself and to close it, by the number that exist; beside it, the
/// same verbs in C, by the number of queue pairs.
fn making() -> Result<(), Box<dyn Error>> {
    const PASSES: usize = 5;
    const MORE: usize = 20;
    const MOST: usize = 10_000;
    let connected = |prepared: PreparedChannel<'static>| {
        let itself = prepared.endpoint();
        prepared.handshake(itself).map_err(|failed| failed.error)
    };
    let [mut in_c, mut alone, mut in_loop] = [const { Shortest(BTreeMap::new()) }; 3];
    for _ in 0..PASSES {
        let (context, context_of_pairs) = (context(), context());
        let domain = Arc::new(ProtectionDomain::new(&context)?);
        let make = || connected(Channel::builder(&domain).build()?);
        // All its channels fit the largest completion queue.
        let mut of: Loop<'static, PooledBuffer> = Loop::new(&context, 5 * (MOST as u32 + 1))?;
        let add = |of: &mut Loop<'static, PooledBuffer>| {
            let builder = of.create_channel(&domain).max_send_wr(2).max_recv_wr(2);
            let channel = connected(builder.build()?)?;
            Ok::<_, TransportError>(of.add(channel).map_err(|failed| failed.error)?)
        };
        let domain_of_pairs = Arc::new(ProtectionDomain::new(&context_of_pairs)?);
        let mut rig = Rig::on(&context_of_pairs);
        let mut handles = Handles::of(&mut rig);
        let (mut pairs, mut channels) = (Vec::new(), Vec::new());
        for count in steps(MOST) {
            while pairs.len() < count {
                pairs.push(queue_pair(&domain_of_pairs, &rig.queue, WINDOW)?);
                channels.push(make()?);
                add(&mut of)?;
            }
            for _ in 0..ROUNDS / PASSES {
                let start = Instant::now();
                // SAFETY: the rig lives on.
                if unsafe { c_tuned_w19(&raw mut handles, MORE as u64) } < 0 {
                    return Err("a verb has failed in C".into());
                }
                in_c.note(count, start.elapsed(), MORE * 1000);
                let start = Instant::now();
                for _ in 0..MORE {
                    drop(make()?);
                }
                alone.note(count, start.elapsed(), MORE * 1000);
                let start = Instant::now();
                for _ in 0..MORE {
                    let channel = add(&mut of)?;
                    of.remove(channel)?;
                }
                in_loop.note(count, start.elapsed(), MORE * 1000);
            }
        }
    }
    in_c.print("making", "the verbs in C, a completion queue each");
    alone.print("making", "Channel, with queues of 16");
    in_loop.print("making", "a channel of a Loop, with queues of 2");
    Ok(())
}

/// The cost of a queue pair by the number that exist, and the steps of a connection.
fn connections() -> Result<(), Box<dyn Error>> {
    let context = context();
    let domain = Arc::new(ProtectionDomain::new(&context)?);
    let queue = Arc::new(CompletionQueue::new(&context, 1 << 16)?);
    queue_pairs(
        [THE_CRATE, "the crate"],
        1,
        || queue_pair(&domain, &queue, 16),
        // The size of the objects on the heap, if any, and their own.
        |count| Ok((allocator::bytes() + count * size_of::<QueuePair<'static>>()) as f64),
    )?;
    connection(THE_CRATE, || prepared(&domain, &queue, 16))?;
    Ok(())
}
