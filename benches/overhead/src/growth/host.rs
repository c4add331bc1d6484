//! On the lean device: what this crate costs, and nothing else.

use std::error::Error;
use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use ibverbs::{
    Channel, CompletionFields, CompletionQueue, MemoryRegion, PreparedQueuePair, ProtectionDomain,
    QueuePair, QueuePairType, SendWorkRequest, WorkCompletion,
};

use crate::rig::{LENGTH, context};
use crate::{allocator, connection, doublings, least, micros, point, steps};

/// How often each is measured.
const ROUNDS: usize = 31;

pub(crate) fn measure() -> Result<(), Box<dyn Error>> {
    poll()?;
    outstanding()?;
    queue_pairs()
}

const THE_CRATE: &str = "the crate, on a device of functions";

/// How many completions lie in the queue when polling begins.
const COMPLETIONS: usize = 4096;

fn prepared(
    domain: &Arc<ProtectionDomain<'static>>,
    queue: &Arc<CompletionQueue<'static>>,
    depth: usize,
) -> ibverbs::Result<PreparedQueuePair<'static>> {
    QueuePair::builder(domain, queue, queue, QueuePairType::ReliableConnected)
        .max_send_wr(depth as u32)
        .max_recv_wr(1)
        .build()
}

/// A queue pair that is connected to itself.
fn queue_pair(
    domain: &Arc<ProtectionDomain<'static>>,
    queue: &Arc<CompletionQueue<'static>>,
    depth: usize,
) -> ibverbs::Result<QueuePair<'static>> {
    let prepared = prepared(domain, queue, depth)?;
    let itself = prepared.endpoint();
    prepared.handshake(itself)
}

/// The cost of a completion by how many are polled at a time.
fn poll() -> Result<(), Box<dyn Error>> {
    let context = context();
    let domain = Arc::new(ProtectionDomain::new(&context)?);
    let region = MemoryRegion::<u8>::new(&domain, LENGTH)?;
    let elements = [region.gather_element(..)?];
    let mut request = SendWorkRequest::new(&elements)?;
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
            unsafe { queue_pair.post(&mut request, wr_id) }
        })
    };
    for batch in doublings(1, 1024) {
        let mut took = Vec::new();
        for _ in 0..ROUNDS {
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
            took.push(start.elapsed().as_secs_f64() * 1e9 / COMPLETIONS as f64);
            black_box(sum);
        }
        point("poll", "CompletionQueue::poll", batch, least(took));

        let mut took = Vec::new();
        for _ in 0..ROUNDS {
            fill(&mut extended)?;
            let (mut left, mut sum) = (COMPLETIONS, 0);
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
            took.push(start.elapsed().as_secs_f64() * 1e9 / COMPLETIONS as f64);
            black_box(sum);
        }
        point("poll", "ExtendedPoller::poll", batch, least(took));
    }
    Ok(())
}

/// The cost of an operation by how many others are outstanding.
fn outstanding() -> Result<(), Box<dyn Error>> {
    const OPERATIONS: usize = 1 << 14;
    const MOST: usize = 4096;
    let context = context();
    let domain = Arc::new(ProtectionDomain::new(&context)?);
    let region = MemoryRegion::<u8>::new(&domain, LENGTH)?;
    let elements = [region.gather_element(..)?];
    let mut request = SendWorkRequest::new(&elements)?;
    let queue = Arc::new(CompletionQueue::new(&context, MOST as u32 + 1)?);
    let mut queue_pair = queue_pair(&domain, &queue, MOST + 1)?;
    let mut completions = [WorkCompletion::default()];
    let prepared = Channel::builder(&domain).max_send_wr(MOST as u32 + 1).build()?;
    let itself = prepared.endpoint();
    let mut channel = prepared.handshake(itself)?;
    let message = region.slice(..)?;

    for depth in doublings(1, MOST) {
        let mut took = Vec::new();
        for _ in 0..ROUNDS {
            // SAFETY: the region lives on, and nobody writes it.
            let mut post = |wr_id| unsafe { queue_pair.post(&mut request, wr_id) };
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
            took.push(start.elapsed().as_secs_f64() * 1e9 / OPERATIONS as f64);
            for _ in 0..depth {
                complete()?;
            }
        }
        point("outstanding", "QueuePair::post and poll", depth, least(took));
    }
    channel.scope(|scope| {
        let mut handles = Vec::with_capacity(MOST);
        for depth in doublings(1, MOST) {
            let mut took = Vec::new();
            for _ in 0..ROUNDS {
                for _ in 0..depth {
                    handles.push(scope.post_send(message)?);
                }
                let start = Instant::now();
                for operation in 0..OPERATIONS {
                    let handle = &mut handles[operation & (depth - 1)];
                    let oldest = std::mem::replace(handle, scope.post_send(message)?);
                    black_box(oldest.wait()?.1.byte_len());
                }
                took.push(start.elapsed().as_secs_f64() * 1e9 / OPERATIONS as f64);
                for handle in handles.drain(..) {
                    handle.wait()?;
                }
            }
            point("outstanding", "Scope::post_send and wait", depth, least(took));
        }
        Ok::<_, ibverbs::TransportError>(())
    })?;
    Ok(())
}

/// Time and memory of a queue pair by how many there are, and the steps of a connection.
fn queue_pairs() -> Result<(), Box<dyn Error>> {
    let context = context();
    let domain = Arc::new(ProtectionDomain::new(&context)?);
    let queue = Arc::new(CompletionQueue::new(&context, 1 << 16)?);
    let mut queue_pairs = Vec::with_capacity(1000);
    for count in steps(1000) {
        let (mut took, mut bytes) = (Vec::new(), 0);
        for _ in 0..ROUNDS {
            let before = allocator::bytes();
            let start = Instant::now();
            for _ in 0..count {
                queue_pairs.push(queue_pair(&domain, &queue, 16)?);
            }
            took.push(micros(start.elapsed()) / count as f64);
            let heap = (allocator::bytes() - before) / count;
            bytes = heap + size_of::<QueuePair<'static>>();
            queue_pairs.clear();
        }
        point("queue-pair-time", THE_CRATE, count, least(took));
        point("queue-pair-bytes", "the crate", count, bytes as f64);
    }
    connection(THE_CRATE, || prepared(&domain, &queue, 16))?;
    Ok(())
}
