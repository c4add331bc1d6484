//! SRD on a device that is like EFA: messages that arrive once and in any order, failures that harm no other, and EFA's
//! limits.

#[path = "support/patience.rs"]
mod patience;

use std::collections::BTreeMap;
use std::time::Instant;

use ibverbs::device::EfaCapabilities;
use ibverbs::queue_pair::Srd;
use ibverbs::{
    AccessFlags, AddressHandle, CompletionQueue, Context, Inline, ProtectionDomain, QueuePair,
    QueuePairEndpoint, ReadWorkRequest, SendWorkRequest, WorkCompletion, WorkStatus,
    WriteWorkRequest, operation::DatagramPeer, queue_pair::AddressVector, settings::MaxRnrRetries,
};
use ibverbs_software::{Device, Network};

use patience::deadline;

const QKEY: u32 = 0x1234;
const ALL: EfaCapabilities =
    EfaCapabilities::RDMA_READ.union(EfaCapabilities::RDMA_WRITE).union(EfaCapabilities::RNR_RETRY);
const MESSAGES: usize = 200;
/// EFA's longest message has three packets here.
const LONGEST: usize = 8928;

fn devices(network: &Network) -> [Device; 2] {
    [(); 2].map(|()| Device::builder().efa(ALL).network(network).build().unwrap())
}

fn pair<'a>(
    domain: &'a ProtectionDomain<'a>,
    queue: &'a CompletionQueue<'a>,
) -> QueuePair<'a, Srd> {
    let builder = domain.create_qp(queue, queue, Srd).qkey(QKEY).max_send_wr(256).max_recv_wr(256);
    builder.max_inline_data(32).build().unwrap().activate().unwrap()
}

fn path<'a>(domain: &'a ProtectionDomain<'a>, to: &QueuePairEndpoint) -> AddressHandle<'a> {
    let vector = AddressVector::to_peer(domain.context(), 1, to).unwrap();
    domain.create_ah(&vector).unwrap()
}

fn completions(queue: &CompletionQueue<'_>, count: usize) -> Vec<WorkCompletion> {
    let (mut all, mut room, end) = (Vec::new(), [WorkCompletion::default(); 16], deadline());
    while all.len() < count {
        all.extend_from_slice(queue.poll(&mut room).unwrap());
        assert!(Instant::now() < end, "{} of {count} completions", all.len());
    }
    all
}

fn status(completion: &WorkCompletion) -> Option<WorkStatus> {
    completion.result().err().map(|error| error.status())
}

fn length(message: usize) -> usize {
    [8, 100, 4096, 4097, LONGEST][message % 5]
}

/// Sends messages over a bad network; returns the order in which they arrive and complete.
fn order(seed: u64) -> (Vec<usize>, Vec<u64>) {
    let network = Network::builder().seed(seed).loss(0.05).duplicate(0.1).reorder(0.2).build();
    let [one, other] = devices(&network);
    let contexts = [one.open().unwrap(), other.open().unwrap()];
    let domains = contexts.each_ref().map(|context| context.alloc_pd().unwrap());
    let queues = contexts.each_ref().map(|context| context.create_cq(1024).unwrap());
    let mut sender = pair(&domains[0], &queues[0]);
    let mut receiver = pair(&domains[1], &queues[1]);
    let to = receiver.endpoint();
    let (there, back) = (path(&domains[0], &to), path(&domains[1], &sender.endpoint()));
    let mut sent = domains[0].allocate::<u8>(MESSAGES * LONGEST).unwrap();
    let mut arrived = domains[1].allocate::<u8>(MESSAGES * LONGEST).unwrap();
    for message in 0..MESSAGES {
        let range = message * LONGEST..(message + 1) * LONGEST;
        sent[range.clone()].fill(message as u8);
        // SAFETY: nobody looks at the memory before it has arrived.
        unsafe { receiver.post_receive(&mut arrived, range, message as u64).unwrap() };
    }
    for message in 0..MESSAGES {
        let start = message * LONGEST;
        let piece = sent.gather_element(start..start + length(message)).unwrap();
        let to = DatagramPeer { path: &there, number: to.num(), qkey: QKEY };
        let send = SendWorkRequest::new(&piece).immediate(message as u32).to(to);
        // SAFETY: region and handle outlive the queue pair.
        unsafe { sender.batch(|batch| batch.add(send, message as u64)).unwrap() };
    }
    let received = completions(&queues[1], MESSAGES);
    let mut found = BTreeMap::new();
    let mut order = Vec::new();
    for completion in &received {
        let success = completion.result().unwrap();
        assert_eq!(success.source_queue_pair(), sender.number());
        assert_eq!(success.source_lid(), back.efa_number().unwrap());
        let message = success.immediate().unwrap() as usize;
        assert_eq!(success.byte_len() as usize, length(message), "and no header before it");
        let start = completion.wr_id() as usize * LONGEST;
        assert!(arrived[start..start + length(message)].iter().all(|&byte| byte == message as u8));
        assert_eq!(found.insert(message, ()), None, "{message} came twice");
        order.push(message);
    }
    let sends = completions(&queues[0], MESSAGES);
    assert!(sends.iter().all(WorkCompletion::is_success));
    assert_eq!(one.live_objects().queue_pairs, 1, "flows are none of the program's");
    (order, sends.iter().map(WorkCompletion::wr_id).collect())
}

#[test]
fn each_message_arrives_once_in_an_order_that_the_seed_decides() {
    let (first, other) = (order(1), order(2));
    assert_ne!(first.0, (0..MESSAGES).collect::<Vec<_>>());
    assert_eq!(first, order(1));
    assert_ne!(first.0, other.0);
    let mut all = first.1;
    all.sort_unstable();
    assert_eq!(all, (0..MESSAGES as u64).collect::<Vec<_>>());
}

/// The order is not that of the posts even where nothing is lost, and on real devices too.
#[test]
fn messages_overtake_each_other_on_any_device() {
    let device = Device::builder().efa(ALL).build().unwrap();
    let context = device.open().unwrap();
    let domain = context.alloc_pd().unwrap();
    let queues = [(); 2].map(|()| context.create_cq(512).unwrap());
    let (mut one, mut other) = (pair(&domain, &queues[0]), pair(&domain, &queues[1]));
    let to = path(&domain, &other.endpoint());
    let mut memory = domain.allocate::<u8>(4096).unwrap();
    for n in 0..128 {
        // SAFETY: nobody looks at the memory.
        unsafe { other.post_receive(&mut memory, .., n).unwrap() };
    }
    let peer = DatagramPeer { path: &to, number: other.number(), qkey: QKEY };
    // SAFETY: the handle outlives the queue pair; inline data is copied.
    unsafe {
        one.batch(|batch| {
            (0..128_u32).try_for_each(|n| {
                let bytes = n.to_ne_bytes();
                let send = SendWorkRequest::new(Inline(&bytes)).immediate(n).to(peer);
                batch.add(send, n.into())
            })
        })
        .unwrap();
    }
    let order: Vec<_> = completions(&queues[1], 128)
        .iter()
        .map(|c| c.result().unwrap().immediate().unwrap())
        .collect();
    assert!(!order.is_sorted(), "{order:?}");
    assert_eq!(completions(&queues[0], 128).len(), 128);
}

#[test]
fn writes_reads_and_failures_are_each_for_themselves() {
    let network = Network::builder().seed(3).loss(0.02).reorder(0.1).build();
    let [one, other] = devices(&network);
    let contexts = [one.open().unwrap(), other.open().unwrap()];
    let domains = contexts.each_ref().map(|context| context.alloc_pd().unwrap());
    let queues = contexts.each_ref().map(|context| context.create_cq(64).unwrap());
    let (mut sender, mut receiver) = (pair(&domains[0], &queues[0]), pair(&domains[1], &queues[1]));
    let there = path(&domains[0], &receiver.endpoint());
    const SIZE: usize = 100_000;
    let access = AccessFlags::REMOTE_READ | AccessFlags::REMOTE_WRITE;
    let window = domains[1].allocate_shared::<u8>(SIZE, access).unwrap();
    let hidden = domains[1].allocate_shared::<u8>(8, AccessFlags::REMOTE_READ).unwrap();
    let mut source = domains[0].allocate::<u8>(SIZE).unwrap();
    source.iter_mut().enumerate().for_each(|(n, byte)| *byte = (n % 251) as u8);
    let mut back = domains[0].allocate::<u8>(SIZE).unwrap();
    let mut empty = domains[1].allocate::<u8>(8).unwrap();
    let to = DatagramPeer { path: &there, number: receiver.number(), qkey: QKEY };
    // SAFETY: the regions and the handle outlive the queue pairs.
    unsafe {
        receiver.post_receive(&mut empty, .., 9).unwrap();
        let whole = [source.gather_element(..).unwrap()];
        let write = WriteWorkRequest::new(&whole, window.remote()).immediate(77).to(to);
        sender.batch(|batch| batch.add(write, 1)).unwrap();
    }
    assert!(completions(&queues[0], 1)[0].is_success());
    let received = completions(&queues[1], 1)[0].result().unwrap();
    assert_eq!((received.immediate(), received.byte_len() as usize), (Some(77), SIZE));
    let small = [source.gather_element(..8).unwrap()];
    // SAFETY: as above.
    unsafe {
        let mut scatter = [back.scatter_element(..).unwrap()];
        let read = ReadWorkRequest::new(&mut scatter, window.remote()).to(to);
        let wrong_key = DatagramPeer { qkey: QKEY + 1, ..to };
        let nobody = DatagramPeer { number: 0x77_7777, ..to };
        sender
            .batch(|batch| {
                batch.add(WriteWorkRequest::new(&small, hidden.remote()).to(to), 2)?;
                batch.add(read, 3)?;
                batch.add(SendWorkRequest::new(&small).to(wrong_key), 4)?;
                batch.add(SendWorkRequest::new(&small).to(nobody), 5)
            })
            .unwrap();
    }
    let mut ended: Vec<_> =
        completions(&queues[0], 4).iter().map(|c| (c.wr_id(), status(c))).collect();
    ended.sort_unstable_by_key(|ended| ended.0);
    assert_eq!(
        ended,
        [
            (2, Some(WorkStatus::RemoteAccess)),
            (3, None),
            (4, Some(WorkStatus::RemoteInvalidReadRequest)),
            (5, Some(WorkStatus::RemoteInvalidReadRequest)),
        ]
    );
    assert!(back[..] == source[..]);
    // Both go on.
    // SAFETY: as above.
    unsafe {
        receiver.post_receive(&mut empty, .., 10).unwrap();
        sender.batch(|batch| batch.add(SendWorkRequest::new(&small).to(to), 6)).unwrap();
    }
    assert!(completions(&queues[0], 1)[0].is_success());
    assert_eq!(completions(&queues[1], 1)[0].wr_id(), 10);
    // A message that is too long for its receive is the sender's failure and the receiver's.
    // SAFETY: as above.
    unsafe {
        receiver.post_receive(&mut empty, .., 11).unwrap();
        let longer = [source.gather_element(..9).unwrap()];
        sender.batch(|batch| batch.add(SendWorkRequest::new(&longer).to(to), 7)).unwrap();
    }
    assert_eq!(status(&completions(&queues[0], 1)[0]), Some(WorkStatus::RemoteInvalidRequest));
    assert_eq!(status(&completions(&queues[1], 1)[0]), Some(WorkStatus::LocalLength));
}

/// A dead peer's messages fail, while those of others pass by.
#[test]
fn a_dead_peer_holds_up_nobody() {
    let network = Network::builder().seed(4).build();
    let devices = [(); 3].map(|()| Device::builder().efa(ALL).network(&network).build().unwrap());
    let contexts = devices.each_ref().map(|device| device.open().unwrap());
    let domains = contexts.each_ref().map(|context| context.alloc_pd().unwrap());
    let queues = contexts.each_ref().map(|context| context.create_cq(256).unwrap());
    let [mut sender, dead, mut alive] = [0, 1, 2].map(|n| pair(&domains[n], &queues[n]));
    let paths = [&dead, &alive].map(|to| path(&domains[0], &to.endpoint()));
    let numbers = [dead.number(), alive.number()];
    devices[1].set_port_active(1, false).unwrap();
    let mut memory = domains[2].allocate::<u8>(8).unwrap();
    let source = domains[0].allocate::<u8>(8).unwrap();
    for n in 0..100 {
        // SAFETY: nobody looks at the memory.
        unsafe { alive.post_receive(&mut memory, .., n).unwrap() };
    }
    let piece = [source.gather_element(..).unwrap()];
    // SAFETY: the regions and the handles outlive the queue pairs.
    unsafe {
        sender
            .batch(|batch| {
                (0..200_u64).try_for_each(|n| {
                    let at = usize::from(n % 2 == 0);
                    let to = DatagramPeer { path: &paths[at], number: numbers[at], qkey: QKEY };
                    batch.add(SendWorkRequest::new(&piece).to(to), n)
                })
            })
            .unwrap();
    }
    let first = completions(&queues[0], 100);
    let last = completions(&queues[0], 200 - first.len());
    let ended: Vec<_> = first.iter().chain(&last).collect();
    assert!(
        ended[..100].iter().all(|c| c.is_success() && c.wr_id() % 2 == 0),
        "the dead one's are last"
    );
    assert!(ended[100..].iter().all(|c| status(c) == Some(WorkStatus::ResponseTimeout)));
    assert!(ended[100..].iter().all(|c| c.wr_id() % 2 == 1));
    assert_eq!(completions(&queues[2], 100).len(), 100);
}

/// Whatever is under way when a queue pair is reset or in error is flushed, once, and the peer goes on.
#[test]
fn a_queue_pair_that_stops_gives_back_all_requests() {
    let network = Network::builder().seed(5).build();
    let [one, other] = devices(&network);
    let contexts = [one.open().unwrap(), other.open().unwrap()];
    let domains = contexts.each_ref().map(|context| context.alloc_pd().unwrap());
    let queues = contexts.each_ref().map(|context| context.create_cq(256).unwrap());
    let mut receiver = pair(&domains[1], &queues[1]);
    let there = path(&domains[0], &receiver.endpoint());
    let mut memory = domains[1].allocate::<u8>(8).unwrap();
    let source = domains[0].allocate::<u8>(8).unwrap();
    let piece = [source.gather_element(..).unwrap()];
    let to = DatagramPeer { path: &there, number: receiver.number(), qkey: QKEY };
    let mut sender = pair(&domains[0], &queues[0]);
    // Nobody receives: they wait.
    // SAFETY: the regions and the handle outlive the queue pairs.
    unsafe {
        sender
            .batch(|batch| {
                (0..50_u64).try_for_each(|n| batch.add(SendWorkRequest::new(&piece).to(to), n))
            })
            .unwrap();
    }
    assert!(queues[0].poll(&mut [WorkCompletion::default(); 4]).unwrap().is_empty());
    sender.to_error().unwrap();
    let flushed = completions(&queues[0], 50);
    assert!(flushed.iter().all(|c| status(c) == Some(WorkStatus::Flushed)));
    let mut ids: Vec<_> = flushed.iter().map(WorkCompletion::wr_id).collect();
    ids.sort_unstable();
    assert_eq!(ids, (0..50).collect::<Vec<_>>());
    let flushed = sender.number();
    drop(sender);
    let mut sender = pair(&domains[0], &queues[0]);
    // SAFETY: as above.
    unsafe {
        (0..60).for_each(|n| receiver.post_receive(&mut memory, .., n).unwrap());
        sender.batch(|batch| batch.add(SendWorkRequest::new(&piece).to(to), 7)).unwrap();
    }
    assert_eq!(status(&completions(&queues[0], 1)[0]), None);
    // Some of those that were flushed were under way, and arrive.
    let mut senders = Vec::new();
    while senders.last() != Some(&sender.number()) {
        let one = completions(&queues[1], 1);
        senders.extend(one.iter().map(|c| c.result().unwrap().source_queue_pair()));
    }
    assert!(senders.len() < 60 && senders.iter().rev().skip(1).all(|&one| one == flushed));
}

#[test]
fn limits_are_those_of_efa() {
    let device = Device::builder().efa(EfaCapabilities::RDMA_READ).build().unwrap();
    let context = device.open().unwrap();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(64).unwrap();
    let efa = context.query_efa().unwrap();
    assert_eq!(efa.capabilities(), EfaCapabilities::RDMA_READ);
    assert_eq!((efa.max_send_sge(), efa.max_inline_data(), efa.max_rdma_size()), (2, 32, 1 << 30));
    let unsupported = |error: ibverbs::Error| {
        assert_eq!(error.raw_os_error(), Some(libc::EOPNOTSUPP), "{error}");
    };
    unsupported(domain.create_qp(&queue, &queue, ibverbs::Rc).build().unwrap_err());
    unsupported(ibverbs::SharedReceiveQueue::new(&domain, 4, 1).unwrap_err());
    unsupported(domain.allocate_shared::<u8>(8, AccessFlags::REMOTE_WRITE).unwrap_err());
    unsupported(domain.allocate_shared::<u64>(8, AccessFlags::REMOTE_ATOMIC).unwrap_err());
    let retries =
        domain.create_qp(&queue, &queue, Srd).max_rnr_retries(MaxRnrRetries::new(3).unwrap());
    retries.build().unwrap().activate().unwrap();
    let mut queue_pair = pair(&domain, &queue);
    let region = domain.allocate::<u8>(LONGEST + 1).unwrap();
    let to = path(&domain, &queue_pair.endpoint());
    let to = DatagramPeer { path: &to, number: queue_pair.number(), qkey: QKEY };
    let (long, two) = ([region.gather_element(..).unwrap()], region.gather_element(..8).unwrap());
    // SAFETY: nothing is posted.
    unsafe {
        let error = queue_pair.batch(|batch| batch.add(SendWorkRequest::new(&long).to(to), 1));
        assert_eq!(error.unwrap_err().raw_os_error(), Some(libc::EINVAL));
        let short = [two];
        let unsignaled = SendWorkRequest::new(&short).unsignaled();
        let error = queue_pair.batch(|batch| batch.add(unsignaled.to(to), 1));
        assert_eq!(error.unwrap_err().raw_os_error(), Some(libc::EINVAL));
        let write = WriteWorkRequest::new(&short, window()).to(to);
        unsupported(queue_pair.batch(|batch| batch.add(write, 1)).unwrap_err());
    }
    let plain = Device::new().unwrap();
    unsupported(plain.open().unwrap().query_efa().unwrap_err());
    fn window() -> ibverbs::RemoteMemoryRegion {
        ibverbs::RemoteMemoryRegion::new(4096, 8, 1).unwrap()
    }
}

/// A process that comes back with the same address, and numbers that begin again.
#[test]
fn a_peer_that_returns_is_heard() {
    let network = Network::builder().seed(6).build();
    let receiver_device = Device::builder().efa(ALL).network(&network).build().unwrap();
    let context: Context<'_> = receiver_device.open().unwrap();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(64).unwrap();
    let mut receiver = pair(&domain, &queue);
    let mut memory = domain.allocate::<u8>(8).unwrap();
    let mut numbers = Vec::new();
    for _ in 0..3 {
        let device = Device::builder()
            .efa(ALL)
            .network(&network)
            .address("10.7.7.7".parse().unwrap())
            .build()
            .unwrap();
        let context = device.open().unwrap();
        let domain = context.alloc_pd().unwrap();
        let sends = context.create_cq(64).unwrap();
        let mut sender = pair(&domain, &sends);
        let to = path(&domain, &receiver.endpoint());
        let to = DatagramPeer { path: &to, number: receiver.number(), qkey: QKEY };
        let region = domain.allocate::<u8>(8).unwrap();
        let piece = [region.gather_element(..).unwrap()];
        for n in 0..20 {
            // SAFETY: the regions and the handle outlive the queue pairs.
            unsafe {
                receiver.post_receive(&mut memory, .., n).unwrap();
                sender.batch(|batch| batch.add(SendWorkRequest::new(&piece).to(to), n)).unwrap();
            }
        }
        assert!(completions(&sends, 20).iter().all(WorkCompletion::is_success));
        assert_eq!(completions(&queue, 20).len(), 20);
        numbers.push(sender.number());
        // It dies without a word.
        device.set_port_active(1, false).unwrap();
    }
    assert_eq!(numbers[0], numbers[2]);
}
