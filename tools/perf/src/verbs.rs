//! The measured loops on the verbs layer. They post the same requests as perftest.
//!
//! Requests are prepared before the clock starts, and posted as lists again and again.

use std::time::{Duration, Instant};

use ibverbs::operation::{PreparedReceive, SendList};
use ibverbs::{
    CompareSwapWorkRequest, CompletionQueue, FetchAddWorkRequest, QueuePair, QueuePairType,
    ReadWorkRequest, ReceiveWorkRequest, SendWorkRequest, SharedMemoryRegion, WorkCompletion,
    WriteWorkRequest,
    memory::{GatherElement, ScatterElement},
    operation::{DatagramPeer, PreparedRequest},
};

use crate::plan::{Operation, Plan, Transport};
use crate::progress::Progress;
use crate::report::Samples;
use crate::rig::{Memory, Peer, QKEY, ROUTE, Result, Silence, wait};
use crate::wire::PATIENCE;

/// The number of completions that a bandwidth test polls at a time.
const BATCH: usize = 16;
/// After this long without a message, the remaining messages count as lost.
const QUIET: Duration = Duration::from_secs(2);

/// One side of a test. The queue pairs come first: they are destroyed before the memory and address handles
/// of their requests.
pub(crate) struct Verbs<'a> {
    pub(crate) queue_pairs: Vec<QueuePair<'a, QueuePairType>>,
    pub(crate) peers: Vec<Peer<'a>>,
    pub(crate) regions: &'a [SharedMemoryRegion<'a, u8>],
    pub(crate) send_cq: &'a CompletionQueue<'a>,
    pub(crate) receive_cq: &'a CompletionQueue<'a>,
    pub(crate) plan: &'a Plan,
}

/// The elements of the requests of one queue pair, which borrow them.
struct Elements<'m> {
    gather: [GatherElement<'m>; 1],
    scatter: Vec<ScatterElement<'m>>,
}

impl<'m> Elements<'m> {
    fn new(memory: Memory<'m>, plan: &Plan, size: u32) -> Result<Self> {
        let size = size as usize;
        let gather = [memory.source.slice(..size)?.gather_element()?];
        let target = memory.target.slice(..size)?;
        let scatter = (0..plan.list).map(|_| target.scatter_element()).collect::<Result<_, _>>()?;
        Ok(Self { gather, scatter })
    }

    /// The requests of one list. The last one has a completion if `signaled` is set.
    fn requests(
        &mut self,
        plan: &Plan,
        size: u32,
        peer: &'m Peer<'_>,
        signaled: bool,
    ) -> Result<Vec<PreparedRequest<'_, QueuePairType>>> {
        let (gather, count) = (&self.gather, self.scatter.len());
        let is_inline = plan.is_inline(size);
        // The types of requests have the same methods, but no common trait.
        macro_rules! finish {
            ($request:expr, $index:expr) => {
                finish!($request, $index, |request| request)
            };
            ($request:expr, $index:expr, |$any:ident| $to:expr) => {{
                let last = $index + 1 == count;
                let request = $request;
                let $any = if signaled && last { request } else { request.unsignaled() };
                PreparedRequest::new($to, plan.inline)?
            }};
        }
        macro_rules! data {
            ($request:expr) => {{
                let request = $request;
                if is_inline { request.inline() } else { request }
            }};
        }
        let entry = |(index, element)| -> Result<PreparedRequest<'_, QueuePairType>> {
            let result: &mut ScatterElement<'_> = element;
            let remote = || peer.memory(plan.operation, size);
            Ok(match plan.operation {
                Operation::Send => {
                    let request = data!(SendWorkRequest::new(gather));
                    match &peer.path {
                        Some(path) => {
                            let to = DatagramPeer { path, number: peer.number, qkey: QKEY };
                            finish!(request, index, |request| request.to(to))
                        }
                        None => finish!(request, index),
                    }
                }
                Operation::Write => finish!(data!(WriteWorkRequest::new(gather, remote()?)), index),
                Operation::Read => {
                    let results = std::slice::from_mut(result);
                    finish!(ReadWorkRequest::new(results, remote()?), index)
                }
                Operation::FetchAdd => {
                    finish!(FetchAddWorkRequest::new(result, remote()?, 1), index)
                }
                Operation::CompareSwap => {
                    finish!(CompareSwapWorkRequest::new(result, remote()?, 0, 1), index)
                }
            })
        };
        self.scatter.iter_mut().enumerate().map(entry).collect()
    }
}

/// Posts a list.
///
/// # Safety
///
/// The memory and the address handle that it names stay valid until it has completed. (The contents may change
/// in the meantime: it is shared memory, and no code relies on them.)
unsafe fn post(
    queue_pair: &mut QueuePair<'_, QueuePairType>,
    list: &mut SendList<'_, QueuePairType>,
) -> Result<()> {
    // SAFETY: the caller keeps the contract.
    Ok(unsafe { queue_pair.post_list(list) }?)
}

impl Verbs<'_> {
    /// Fills the receive queues. The code that polls a receive's completion posts another receive.
    pub(crate) fn fill_receive_queues(&mut self) -> Result<()> {
        let plan = self.plan;
        if plan.operation != Operation::Send {
            return Ok(());
        }
        for (index, region) in self.regions.iter().enumerate() {
            let mut elements = [Memory::of(region, plan)?.target.scatter_element()?];
            let mut receive = PreparedReceive::new(ReceiveWorkRequest::new(&mut elements))?;
            for _ in 0..plan.receive_depth {
                // SAFETY: the region outlives the queue pair, and is shared memory.
                unsafe { self.queue_pairs[index].post_prepared(&mut receive, index as u64)? };
            }
        }
        Ok(())
    }

    /// Latency of sends, or of writes that the other side detects in memory. The sides take turns; a sample is a
    /// whole round trip.
    pub(crate) fn ping_pong(
        &mut self,
        size: u32,
        iterations: u64,
        first: bool,
        samples: &mut Samples,
        progress: &Progress,
    ) -> Result<Duration> {
        let plan = self.plan;
        let memory = Memory::of(&self.regions[0], plan)?;
        let mut elements = Elements::new(memory, plan, size)?;
        let mut entries = elements.requests(plan, size, &self.peers[0], true)?;
        let mut list = SendList::new(&mut entries)?;
        let mut receives = [memory.target.scatter_element()?];
        let mut receive = PreparedReceive::new(ReceiveWorkRequest::new(&mut receives))?;
        let by_memory = plan.operation == Operation::Write;
        let last = size as usize - 1;
        let (ours, theirs) = (memory.source.atomic(last)?, memory.target.atomic(last)?);
        let queue_pair = &mut self.queue_pairs[0];
        let mut room = [WorkCompletion::default()];
        let length = size as usize + if plan.transport == Transport::Datagram { ROUTE } else { 0 };

        let start = samples.begin();
        let mut before = start;
        for iteration in 0..iterations {
            // Consecutive marks differ, and the first one differs from the initial 0.
            let mark = (iteration % 255) as u8 + 1;
            for send in [first, !first] {
                if send {
                    if by_memory {
                        ours.store(mark, std::sync::atomic::Ordering::Release);
                    }
                    // SAFETY: the region and the address handle outlive the queue pair.
                    unsafe { post(queue_pair, &mut list)? };
                    one(self.send_cq, plan, &mut room)?;
                } else if by_memory {
                    see(theirs, mark, plan)?;
                } else {
                    let received = one(self.receive_cq, plan, &mut room)?;
                    if received as usize != length {
                        return Err(wrong_length(received, length));
                    }
                    // SAFETY: the region outlives the queue pair, and is shared memory.
                    unsafe { queue_pair.post_prepared(&mut receive, 0)? };
                }
            }
            before = samples.mark();
            progress.at(iteration);
        }
        samples.end();
        Ok(before - start)
    }

    /// Latency of operations in which the peer's program takes no part: reads and atomics.
    pub(crate) fn one_by_one(
        &mut self,
        size: u32,
        iterations: u64,
        samples: &mut Samples,
        progress: &Progress,
    ) -> Result<Duration> {
        let plan = self.plan;
        let mut elements = Elements::new(Memory::of(&self.regions[0], plan)?, plan, size)?;
        let mut entries = elements.requests(plan, size, &self.peers[0], true)?;
        let mut list = SendList::new(&mut entries)?;
        let mut room = [WorkCompletion::default()];
        let start = samples.begin();
        let mut before = start;
        for iteration in 0..iterations {
            // SAFETY: the region outlives the queue pair, and is shared memory.
            unsafe { post(&mut self.queue_pairs[0], &mut list)? };
            one(self.send_cq, plan, &mut room)?;
            before = samples.mark();
            progress.at(iteration);
        }
        samples.end();
        Ok(before - start)
    }

    /// Bandwidth: keeps the send queues full until `iterations` on each have completed.
    pub(crate) fn flood(
        &mut self,
        size: u32,
        iterations: u64,
        progress: &Progress,
    ) -> Result<Duration> {
        let plan = self.plan;
        let elements = || -> Result<Vec<Elements<'_>>> {
            let regions = self.regions.iter();
            regions.map(|r| Elements::new(Memory::of(r, plan)?, plan, size)).collect()
        };
        // A list without a completion, and one with.
        let (mut quiet, mut loud) = (elements()?, elements()?);
        let mut quiet = requests(&mut quiet, plan, size, &self.peers, false)?;
        let mut loud = requests(&mut loud, plan, size, &self.peers, true)?;
        let (mut quiet, mut loud) = (lists(&mut quiet)?, lists(&mut loud)?);

        let (step, depth) = (u64::from(plan.list), u64::from(plan.send_depth));
        let moderation = u64::from(plan.moderation);
        let mut posted = vec![0_u64; self.queue_pairs.len()];
        let mut completed = posted.clone();
        let mut room = [WorkCompletion::default(); BATCH];
        let (mut done, total) = (0, iterations * self.queue_pairs.len() as u64);
        let start = Instant::now();
        while done < total {
            for (index, queue_pair) in self.queue_pairs.iter_mut().enumerate() {
                let (posted, completed) = (&mut posted[index], completed[index]);
                while *posted < iterations && *posted + step - completed <= depth {
                    *posted += step;
                    // The completion of the last request covers all before it.
                    let tells = posted.is_multiple_of(moderation) || *posted == iterations;
                    let list = if tells { &mut loud[index] } else { &mut quiet[index] };
                    // SAFETY: region and address handle outlive the queue pair; it is shared memory.
                    unsafe { post(queue_pair, list)? };
                }
            }
            let found = wait(self.send_cq, plan.events, &mut room, PATIENCE)?;
            if found.is_empty() {
                return Err(Silence(plan.transport).into());
            }
            for completion in found {
                completion.result()?;
                let index = usize::try_from(completion.wr_id())?;
                // A completion covers as many requests as the moderation, except for the last one.
                let now = (completed[index] + moderation).min(posted[index]);
                done += now - completed[index];
                completed[index] = now;
            }
            progress.at(done);
        }
        Ok(start.elapsed())
    }

    /// The receiving side of the bandwidth of sends. Returns the number of messages that arrived, which is less
    /// than the number sent only if messages can be lost.
    pub(crate) fn drain(&mut self, size: u32, iterations: u64) -> Result<u64> {
        let plan = self.plan;
        let mut elements = Vec::new();
        for region in self.regions {
            elements.push([Memory::of(region, plan)?.target.scatter_element()?]);
        }
        let receives = elements.iter_mut().map(ReceiveWorkRequest::new).map(PreparedReceive::new);
        let mut receives = receives.collect::<Result<Vec<_>, _>>()?;
        let mut room = [WorkCompletion::default(); BATCH];
        let is_reliable = plan.transport == Transport::Reliable;
        let length = size as usize + if plan.transport == Transport::Datagram { ROUTE } else { 0 };
        let (mut received, total) = (0, iterations * self.queue_pairs.len() as u64);
        while received < total {
            // The first message may be late: the client does not know yet that we are ready.
            let patience = if is_reliable || received == 0 { PATIENCE } else { QUIET };
            let found = wait(self.receive_cq, plan.events, &mut room, patience)?;
            if found.is_empty() {
                if is_reliable {
                    return Err(Silence(plan.transport).into());
                }
                break;
            }
            for completion in found {
                let arrived = completion.result()?.byte_len();
                if arrived as usize != length {
                    return Err(wrong_length(arrived, length));
                }
                let index = usize::try_from(completion.wr_id())?;
                // SAFETY: the region outlives the queue pair, and is shared memory.
                unsafe {
                    self.queue_pairs[index].post_prepared(&mut receives[index], index as u64)?;
                }
            }
            received += found.len() as u64;
        }
        Ok(received)
    }
}

/// The requests of each queue pair.
fn requests<'e>(
    elements: &'e mut [Elements<'e>],
    plan: &Plan,
    size: u32,
    peers: &'e [Peer<'_>],
    signaled: bool,
) -> Result<Vec<Vec<PreparedRequest<'e, QueuePairType>>>> {
    let pairs = elements.iter_mut().zip(peers);
    pairs.map(|(elements, peer)| elements.requests(plan, size, peer, signaled)).collect()
}

/// The list of each queue pair; the number of its requests is the queue pair's index.
fn lists<'l>(
    requests: &'l mut [Vec<PreparedRequest<'_, QueuePairType>>],
) -> Result<Vec<SendList<'l, QueuePairType>>> {
    let list = |(index, entries): (usize, &'l mut Vec<PreparedRequest<'_, QueuePairType>>)| {
        let mut list = SendList::new(entries)?;
        for entry in 0..list.len() {
            list.set_wr_id(entry, index as u64)?;
        }
        Ok(list)
    };
    requests.iter_mut().enumerate().map(list).collect()
}

/// Waits for one completion; returns its number of bytes (of a receive).
fn one(queue: &CompletionQueue<'_>, plan: &Plan, room: &mut [WorkCompletion; 1]) -> Result<u32> {
    match wait(queue, plan.events, room, PATIENCE)? {
        [completion, ..] => Ok(completion.result()?.byte_len()),
        [] => Err(Silence(plan.transport).into()),
    }
}

/// Waits until the peer has written `mark`.
pub(crate) fn see(byte: &std::sync::atomic::AtomicU8, mark: u8, plan: &Plan) -> Result<()> {
    let (mut looks, mut start) = (0_u32, None);
    while byte.load(std::sync::atomic::Ordering::Acquire) != mark {
        looks = looks.wrapping_add(1);
        if looks.is_multiple_of(4096) && start.get_or_insert_with(Instant::now).elapsed() > PATIENCE
        {
            return Err(Silence(plan.transport).into());
        }
    }
    Ok(())
}

pub(crate) fn wrong_length(received: u32, length: usize) -> Box<dyn std::error::Error> {
    format!("a message of {received} bytes came, not of {length}").into()
}
