//! Extended reliable connections: domains, shared receive queues with numbers, and both halves of connections.

mod domains;
mod network;
mod refusals;

use std::sync::Arc;
use std::time::Duration;

use ibverbs::completion::WorkOpcode;
use ibverbs::device::{AsyncEventKind, AsyncEvents};
use ibverbs::domain::{XrcDomain, XrcDomainScope};
use ibverbs::operation::XrcPeer;
use ibverbs::queue_pair::marker::{AddressedBy, Sends};
use ibverbs::queue_pair::{SendOperations, XrcReceive, XrcSend};
use ibverbs::{
    AccessFlags, CompareSwapWorkRequest, CompletionQueue, Context, FetchAddWorkRequest,
    ProtectionDomain, QueuePair, QueuePairBuilder, ReadWorkRequest, ReceiveWorkRequest,
    SendWorkRequest, SharedMemoryRegion, SharedReceiveQueue, WorkCompletion, WriteWorkRequest,
    settings::MaxRnrRetries,
};
use ibverbs_software::{Device, Network};

const LONG: Duration = Duration::from_secs(1000);

const REMOTE: AccessFlags =
    AccessFlags::REMOTE_READ.union(AccessFlags::REMOTE_WRITE).union(AccessFlags::REMOTE_ATOMIC);

/// All operations of the extended posting interface that the tests use.
const OPERATIONS: SendOperations = SendOperations::SEND
    .union(SendOperations::SEND_WITH_IMMEDIATE)
    .union(SendOperations::WRITE)
    .union(SendOperations::WRITE_WITH_IMMEDIATE)
    .union(SendOperations::READ)
    .union(SendOperations::COMPARE_SWAP)
    .union(SendOperations::FETCH_ADD);

/// A device of a network, and what its queue pairs and queues are made from.
struct Side {
    device: Device,
    context: Arc<Context<'static>>,
    domain: Arc<ProtectionDomain<'static>>,
    xrc: Arc<XrcDomain<'static>>,
    /// The completion queue of the sends, and that of the receives.
    sent: Arc<CompletionQueue<'static>>,
    received: Arc<CompletionQueue<'static>>,
}

impl Side {
    fn new(network: &Network) -> Self {
        Self::of(network.device().unwrap())
    }

    fn of(device: Device) -> Self {
        let context = Arc::new(device.open().unwrap());
        let queue = || Arc::new(CompletionQueue::new(&context, 128).unwrap());
        Self {
            domain: Arc::new(ProtectionDomain::new(&context).unwrap()),
            xrc: Arc::new(XrcDomain::open(&context, XrcDomainScope::Private).unwrap()),
            sent: queue(),
            received: queue(),
            context,
            device,
        }
    }

    fn shared_queue(&self) -> SharedReceiveQueue<'static> {
        SharedReceiveQueue::extended(&self.domain, &self.xrc, &self.received, 64, 2).unwrap()
    }

    fn sending(&self) -> QueuePairBuilder<'static, XrcSend> {
        let Self { domain, sent, .. } = self;
        let builder = QueuePair::builder(domain, sent, sent, XrcSend);
        let builder = builder.max_send_wr(64).max_inline_data(64);
        builder.max_rnr_retries(MaxRnrRetries::UNLIMITED).extended(OPERATIONS)
    }

    fn receiving(&self) -> QueuePairBuilder<'static, XrcReceive> {
        let Self { domain, received, .. } = self;
        let builder = QueuePair::builder(domain, received, received, XrcReceive);
        builder.xrc_domain(&self.xrc).access(REMOTE)
    }

    fn memory(&self) -> SharedMemoryRegion<'static, u64> {
        SharedMemoryRegion::new(&self.domain, 1024, REMOTE).unwrap()
    }
}

/// Two devices on a network where time passes by `run_until_idle` and `advance` alone.
fn world(seed: u64, loss: f64) -> (Network, [Side; 2]) {
    let delay = Duration::from_micros(10);
    let network = Network::builder().seed(seed).loss(loss).delay(delay).manual().build();
    let sides = [(); 2].map(|()| Side::new(&network));
    (network, sides)
}

/// The two halves of a connection.
fn connect(
    from: &Side,
    to: &Side,
) -> (QueuePair<'static, XrcSend>, QueuePair<'static, XrcReceive>) {
    let (sending, receiving) = (from.sending().build().unwrap(), to.receiving().build().unwrap());
    let endpoints = (sending.endpoint(), receiving.endpoint());
    (sending.handshake(endpoints.1).unwrap(), receiving.handshake(endpoints.0).unwrap())
}

/// Posts a receive of the elements of `memory` in `range`.
fn post(
    queue: &SharedReceiveQueue<'_>,
    memory: &SharedMemoryRegion<'_, u64>,
    range: std::ops::Range<usize>,
    wr_id: u64,
) -> ibverbs::Result<()> {
    let mut elements = [memory.scatter_element(range).unwrap()];
    let request = ReceiveWorkRequest::new(&mut elements);
    // SAFETY: the tests keep the memory until all is done.
    unsafe { queue.post(request, wr_id) }
}

/// Sends the elements of `memory` in `range` to the shared receive queue of that number.
fn send<T: Sends + AddressedBy<XrcPeer>>(
    queue_pair: &mut QueuePair<'_, T>,
    memory: &SharedMemoryRegion<'_, u64>,
    range: std::ops::Range<usize>,
    queue: u32,
    wr_id: u64,
) -> ibverbs::Result<()> {
    let elements = [memory.gather_element(range).unwrap()];
    let request = SendWorkRequest::new(&elements).to(XrcPeer(queue));
    // SAFETY: as above.
    unsafe { queue_pair.post(request, wr_id) }
}

fn poll(queue: &CompletionQueue<'_>) -> Vec<WorkCompletion> {
    let mut room = [WorkCompletion::default(); 128];
    queue.poll(&mut room).unwrap().to_vec()
}

/// The numbers of the requests that have completed, all with success.
fn succeeded(queue: &CompletionQueue<'_>) -> Vec<u64> {
    let found = poll(queue);
    assert!(found.iter().all(WorkCompletion::is_success), "{found:?}");
    found.iter().map(WorkCompletion::wr_id).collect()
}

/// Every operation, posted one by one or as a batch. Returns what was in the peer's memory at each atomic.
fn all_operations(
    queue_pair: &mut QueuePair<'_, XrcSend>,
    (here, there): (&SharedMemoryRegion<'_, u64>, &SharedMemoryRegion<'_, u64>),
    queue: u32,
    batch: bool,
) {
    let remote = |range| there.remote_range(range).unwrap();
    let [send, write] = [0..4, 4..8].map(|range| [here.gather_element(range).unwrap()]);
    let mut read = [here.scatter_element(600..1000).unwrap()];
    let mut results = [16, 17].map(|i| here.scatter_element(i..i + 1).unwrap());
    let [added, swapped] = &mut results;
    let to = XrcPeer(queue);
    // SAFETY: the memory is kept, and accessed when all is done.
    unsafe {
        if batch {
            queue_pair
                .batch(|b| {
                    b.add(SendWorkRequest::new(&send).to(to), 1)?;
                    b.add(SendWorkRequest::new(&send).immediate(22).to(to), 2)?;
                    b.add(WriteWorkRequest::new(&write, remote(100..104)).to(to), 3)?;
                    b.add(WriteWorkRequest::new(&write, remote(104..108)).immediate(44).to(to), 4)?;
                    b.add(ReadWorkRequest::new(&mut read, remote(0..400)).to(to), 5)?;
                    b.add(FetchAddWorkRequest::new(added, remote(512..513), 7).to(to), 6)?;
                    b.add(CompareSwapWorkRequest::new(swapped, remote(512..513), 7, 9).to(to), 7)
                })
                .unwrap();
            return;
        }
        let plain = || SendWorkRequest::new(&send);
        let writing = |remote| WriteWorkRequest::new(&write, remote);
        queue_pair.post(plain().to(to), 1).unwrap();
        queue_pair.post(plain().immediate(22).to(to), 2).unwrap();
        queue_pair.post(writing(remote(100..104)).to(to), 3).unwrap();
        queue_pair.post(writing(remote(104..108)).immediate(44).to(to), 4).unwrap();
        let request = ReadWorkRequest::new(&mut read, remote(0..400));
        queue_pair.post(request.to(to), 5).unwrap();
        let request = FetchAddWorkRequest::new(added, remote(512..513), 7);
        queue_pair.post(request.to(to), 6).unwrap();
        let request = CompareSwapWorkRequest::new(swapped, remote(512..513), 7, 9);
        queue_pair.post(request.to(to), 7).unwrap();
    }
}

#[test]
fn all_operations_reach_the_domain_of_the_queue_that_they_name() {
    for (batch, loss) in [(false, 0.0), (true, 0.0), (false, 0.2), (true, 0.2)] {
        let (network, [one, other]) = world(3, loss);
        let (mut sending, receiving) = connect(&one, &other);
        let queue = other.shared_queue();
        let (here, there) = (one.memory(), other.memory());
        (0..8).for_each(|i| here.write_one(i, 100 + i as u64).unwrap());
        (0..400).for_each(|i| there.write_one(i, i as u64).unwrap());
        // The third is for the immediate value of a write, and holds nothing.
        for (id, range) in [(11, 700..704), (12, 710..714), (13, 720..724)] {
            post(&queue, &there, range, id).unwrap();
        }
        all_operations(&mut sending, (&here, &there), queue.number().unwrap(), batch);
        assert!(network.run_until_idle(LONG));

        assert_eq!(succeeded(&one.sent), [1, 2, 3, 4, 5, 6, 7]);
        let received = poll(&other.received);
        let seen: Vec<_> = received
            .iter()
            .map(|completion| {
                let success = completion.result().unwrap();
                assert_eq!(completion.queue_pair_number(), receiving.number());
                assert_eq!(success.source_queue_pair(), sending.number());
                (completion.wr_id(), success.opcode(), success.byte_len(), success.immediate())
            })
            .collect();
        let write = WorkOpcode::ReceiveWriteWithImmediate;
        let expected = [
            (11, WorkOpcode::Receive, 32, None),
            (12, WorkOpcode::Receive, 32, Some(22)),
            (13, write, 32, Some(44)),
        ];
        assert_eq!(seen, expected);
        let there = there.to_vec();
        for (at, from) in [(700, 100), (710, 100), (100, 104), (104, 104)] {
            assert_eq!(there[at..at + 4], [from, from + 1, from + 2, from + 3], "at {at}");
        }
        assert_eq!((there[720], there[512]), (0, 9));
        let here = here.to_vec();
        // The writes came before the read.
        assert_eq!(here[600..1000], there[..400]);
        assert_eq!(here[16..18], [0, 7], "what the atomics found");
        assert!(poll(&other.sent).is_empty() && poll(&one.received).is_empty());
    }
}

#[test]
fn many_connections_deliver_to_one_queue() {
    let (network, [one, other]) = world(4, 0.1);
    let third = Side::new(&network);
    let mut pairs = [&one, &third, &one, &other].map(|from| (connect(from, &other), from.memory()));
    let queue = other.shared_queue();
    let there = other.memory();
    let events = AsyncEvents::new(&*other.context).unwrap();
    for id in 0..40 {
        post(&queue, &there, id..id + 1, id as u64).unwrap();
    }
    queue.set_limit(30).unwrap();
    for (i, ((sending, _), memory)) in pairs.iter_mut().enumerate() {
        for n in 0..10 {
            memory.write_one(n, (i * 10 + n) as u64).unwrap();
            send(sending, memory, n..n + 1, queue.number().unwrap(), n as u64).unwrap();
        }
    }
    assert!(network.run_until_idle(LONG));
    // Every message came once, and those of each connection in their order.
    let received = poll(&other.received);
    let ids: Vec<u64> = received.iter().map(WorkCompletion::wr_id).collect();
    assert_eq!(ids, (0..40).collect::<Vec<_>>(), "receives are taken in order");
    for (i, ((_, receiving), _)) in pairs.iter().enumerate() {
        let of_pair = received.iter().filter(|done| done.queue_pair_number() == receiving.number());
        let messages: Vec<u64> =
            of_pair.map(|done| there.read_one(done.wr_id() as usize).unwrap()).collect();
        let first = i as u64 * 10;
        assert_eq!(messages, (first..first + 10).collect::<Vec<_>>());
    }
    let event = events.next_event().unwrap().unwrap();
    assert_eq!(event.kind(), AsyncEventKind::SharedReceiveQueueLimit);
    assert!(events.next_event().unwrap().is_none(), "it is raised once");
}

/// Queues of one XRC domain have protection domains and completion queues of their own.
#[test]
fn one_connection_serves_queues_of_several_protection_domains() {
    let (network, [one, other]) = world(5, 0.05);
    let (mut sending, _receiving) = connect(&one, &other);
    let second = Arc::new(ProtectionDomain::new(&other.context).unwrap());
    let completions = Arc::new(CompletionQueue::new(&other.context, 16).unwrap());
    let first_queue = other.shared_queue();
    let second_queue =
        SharedReceiveQueue::extended(&second, &other.xrc, &completions, 16, 1).unwrap();
    let numbers = [first_queue.number().unwrap(), second_queue.number().unwrap()];
    assert!(numbers[0] != numbers[1] && numbers.iter().all(|&number| number <= 0xff_ffff));
    let (here, message) = (one.memory(), one.memory());
    message.fill(5);
    let first: SharedMemoryRegion<'_, u64> = other.memory();
    let second: SharedMemoryRegion<'_, u64> =
        SharedMemoryRegion::new(&second, 1024, REMOTE).unwrap();
    (0..1024).for_each(|i| first.write_one(i, i as u64 * 3).unwrap());
    for id in 0..4 {
        post(&first_queue, &first, 1000..1001, id).unwrap();
        post(&second_queue, &second, 0..600, 10 + id).unwrap();
    }
    // Long reads of the first domain's memory are still being answered when messages for the second come.
    for round in 0..4 {
        let mut read = [here.scatter_element(0..900).unwrap()];
        let request = ReadWorkRequest::new(&mut read, first.remote_range(0..900).unwrap());
        // SAFETY: the memory is kept.
        unsafe { sending.post(request.to(XrcPeer(numbers[0])), 1).unwrap() };
        send(&mut sending, &message, 0..600, numbers[1], 2 + round % 2).unwrap();
    }
    send(&mut sending, &message, 7..8, numbers[0], 9).unwrap();
    assert!(network.run_until_idle(LONG));
    assert_eq!(succeeded(&one.sent), [1, 2, 1, 3, 1, 2, 1, 3, 9]);
    assert_eq!(succeeded(&completions), [10, 11, 12, 13]);
    assert_eq!(succeeded(&other.received), [0]);
    assert!(here.to_vec()[..900] == first.to_vec()[..900]);
    assert!(second.to_vec()[..600].iter().all(|&word| word == 5));

    // A key of one domain does not work by the queue of the other.
    let elements = [here.gather_element(0..1).unwrap()];
    let request = WriteWorkRequest::new(&elements, first.remote_range(0..1).unwrap());
    // SAFETY: as above.
    unsafe { sending.post(request.to(XrcPeer(numbers[1])), 20).unwrap() };
    assert!(network.run_until_idle(LONG));
    let done = poll(&one.sent);
    assert_eq!(done[0].result().unwrap_err().status(), ibverbs::WorkStatus::RemoteAccess);
}

#[test]
fn messages_go_to_a_device_with_sockets() {
    let [one, other] = [(); 2].map(|()| Side::of(Device::new().unwrap()));
    let (mut sending, _receiving) = connect(&one, &other);
    let queue = other.shared_queue();
    let (here, there) = (one.memory(), other.memory());
    here.fill(5);
    post(&queue, &there, 0..1024, 1).unwrap();
    send(&mut sending, &here, 0..1024, queue.number().unwrap(), 2).unwrap();
    let wait = |queue: &CompletionQueue<'_>| {
        let start = std::time::Instant::now();
        loop {
            assert!(start.elapsed() < Duration::from_secs(60));
            match succeeded(queue) {
                ids if ids.is_empty() => std::thread::yield_now(),
                ids => break ids,
            }
        }
    };
    assert_eq!((wait(&other.received), wait(&one.sent)), (vec![1], vec![2]));
    assert!(there.to_vec().iter().all(|&word| word == 5));
}
