//! DC on a device that is like mlx5's: initiators that turn from target to target, access keys, and failures.

#[path = "support/patience.rs"]
mod patience;

use std::time::Instant;

use ibverbs::operation::DcPeer;
use ibverbs::queue_pair::{DcTarget, Dci};
use ibverbs::{
    AccessFlags, AddressHandle, CompletionQueue, FetchAddWorkRequest, ProtectionDomain, QueuePair,
    QueuePairEndpoint, QueuePairType, ReadWorkRequest, SendWorkRequest, SharedReceiveQueue,
    WorkCompletion, WorkStatus, WriteWorkRequest, queue_pair::AddressVector,
};
use ibverbs_software::{Device, LiveObjects, Network};

use patience::deadline;

const KEY: u64 = 0x5ec2_e700_0000_0001;

fn device(network: &Network) -> Device {
    Device::builder().mlx5().network(network).build().unwrap()
}

fn initiator<'a>(
    domain: &'a ProtectionDomain<'a>,
    queue: &'a CompletionQueue<'a>,
) -> QueuePair<'a, Dci> {
    domain.create_qp(queue, queue, Dci).max_send_wr(64).build().unwrap().activate().unwrap()
}

fn target<'a>(
    domain: &'a ProtectionDomain<'a>,
    queue: &'a CompletionQueue<'a>,
    receives: &'a SharedReceiveQueue<'a>,
    key: u64,
) -> DcTarget<'a> {
    let access = AccessFlags::REMOTE_READ | AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_ATOMIC;
    let builder =
        domain.create_qp(queue, queue, QueuePairType::Driver).srq(receives).access(access);
    builder.build_dc_target(key).unwrap()
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

/// One initiator sends, writes, reads and adds to three targets in turn, over a bad network: its requests end in their
/// order, and each is carried out once.
#[test]
fn an_initiator_turns_from_target_to_target() {
    const ROUNDS: u64 = 12;
    const SIZE: usize = 10_000;
    let network = Network::builder().seed(1).loss(0.03).duplicate(0.1).reorder(0.1).build();
    let devices = [(); 4].map(|()| device(&network));
    let contexts = devices.each_ref().map(|device| device.open().unwrap());
    let domains = contexts.each_ref().map(|context| context.alloc_pd().unwrap());
    let queues = contexts.each_ref().map(|context| context.create_cq(256).unwrap());
    let receives = domains.each_ref().map(|domain| SharedReceiveQueue::new(domain, 64, 1).unwrap());
    let targets = [1, 2, 3].map(|n| target(&domains[n], &queues[n], &receives[n], KEY + n as u64));
    let paths = targets.each_ref().map(|target| path(&domains[0], &target.endpoint()));
    let access = AccessFlags::REMOTE_READ | AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_ATOMIC;
    let windows = [1, 2, 3].map(|n| domains[n].allocate_shared::<u8>(SIZE, access).unwrap());
    let counters = [1, 2, 3].map(|n| domains[n].allocate_shared::<u64>(1, access).unwrap());
    let mut rooms = [1, 2, 3].map(|n| domains[n].allocate::<u8>(SIZE).unwrap());
    for ((queue, room), domain) in receives[1..].iter().zip(&mut rooms).zip(&domains[1..]) {
        let _ = domain;
        for n in 0..2 * ROUNDS {
            // SAFETY: nobody looks at the memory.
            unsafe { queue.post_receive(room, .., n).unwrap() };
        }
    }
    let mut source = domains[0].allocate::<u8>(SIZE).unwrap();
    source.iter_mut().enumerate().for_each(|(n, byte)| *byte = (n % 251) as u8);
    let mut back = domains[0].allocate::<u8>(SIZE).unwrap();
    let mut before = domains[0].allocate::<u64>(1).unwrap();
    let mut dci = initiator(&domains[0], &queues[0]);
    let whole = [source.gather_element(..).unwrap()];
    for round in 0..ROUNDS {
        let n = round as usize % 3;
        let to = DcPeer {
            path: &paths[n],
            number: targets[n].number(),
            access_key: KEY + 1 + n as u64,
            stream: None,
        };
        let (mut scatter, mut value) =
            ([back.scatter_element(..).unwrap()], [before.scatter_element(..).unwrap()]);
        let remote = windows[n].remote();
        // SAFETY: the regions and the handles outlive the queue pair.
        unsafe {
            dci.batch(|batch| {
                let first = round * 5;
                batch.add(SendWorkRequest::new(&whole).immediate(round as u32).to(to), first)?;
                batch.add(WriteWorkRequest::new(&whole, remote).to(to), first + 1)?;
                batch.add(ReadWorkRequest::new(&mut scatter, remote).to(to), first + 2)?;
                let add = FetchAddWorkRequest::new(&mut value, counters[n].remote(), 1);
                batch.add(add.to(to), first + 3)?;
                let write = WriteWorkRequest::new(&whole, remote).immediate(round as u32);
                batch.add(write.to(to), first + 4)
            })
            .unwrap();
        }
        if round == 5 {
            assert_eq!(
                devices[0].live_objects().queue_pairs,
                1,
                "connections are none of the program's"
            );
        }
        if round % 4 == 3 {
            let ended = completions(&queues[0], 20);
            assert_eq!(ended.iter().find_map(status), None);
            let ids: Vec<_> = ended.iter().map(WorkCompletion::wr_id).collect();
            assert_eq!(ids, ((round - 3) * 5..(round + 1) * 5).collect::<Vec<_>>());
        }
    }
    assert!(back[..] == source[..]);
    for n in 0..3 {
        let arrived = completions(&queues[n + 1], ROUNDS as usize / 3 * 2);
        for (at, completion) in arrived.iter().enumerate() {
            let success = completion.result().unwrap();
            assert_eq!(success.immediate(), Some((at / 2 * 3 + n) as u32));
            assert_eq!(success.source_queue_pair(), dci.number());
            assert_eq!(completion.queue_pair_number(), targets[n].number());
            assert_eq!(success.byte_len() as usize, SIZE);
        }
        assert_eq!(
            counters[n].atomic(0).unwrap().load(std::sync::atomic::Ordering::SeqCst),
            ROUNDS / 3
        );
    }
}

/// A wrong key, a target that is none, and a right that is not given: each fails the initiator, and not the target.
#[test]
fn what_fails_ends_the_initiator_alone() {
    let network = Network::builder().seed(2).build();
    let device = device(&network);
    let context = device.open().unwrap();
    let domain = context.alloc_pd().unwrap();
    let queues = [(); 2].map(|()| context.create_cq(64).unwrap());
    let receives = SharedReceiveQueue::new(&domain, 16, 1).unwrap();
    let target = target(&domain, &queues[1], &receives, KEY);
    let way = path(&domain, &target.endpoint());
    let hidden = domain.allocate_shared::<u8>(8, AccessFlags::REMOTE_READ).unwrap();
    let source = domain.allocate::<u8>(8).unwrap();
    let piece = [source.gather_element(..).unwrap()];
    let right = DcPeer { path: &way, number: target.number(), access_key: KEY, stream: None };
    let wrong_key = DcPeer { access_key: KEY + 1, ..right };
    let nobody = DcPeer { number: 0x77_7777, ..right };
    for (to, writes, expected) in [
        (wrong_key, false, WorkStatus::RemoteAccess),
        (nobody, false, WorkStatus::RemoteInvalidReadRequest),
        (right, true, WorkStatus::RemoteAccess),
    ] {
        let mut dci = initiator(&domain, &queues[0]);
        // SAFETY: the regions and the handle outlive the queue pair.
        unsafe {
            dci.batch(|batch| {
                if writes {
                    batch.add(WriteWorkRequest::new(&piece, hidden.remote()).to(to), 1)?;
                } else {
                    batch.add(SendWorkRequest::new(&piece).to(to), 1)?;
                }
                batch.add(SendWorkRequest::new(&piece).to(to), 2)?;
                batch.add(SendWorkRequest::new(&piece).to(right), 3)
            })
            .unwrap();
        }
        let ended = completions(&queues[0], 3);
        let statuses: Vec<_> = ended.iter().map(|c| (c.wr_id(), status(c))).collect();
        let flushed = Some(WorkStatus::Flushed);
        assert_eq!(statuses, [(1, Some(expected)), (2, flushed), (3, flushed)]);
    }
    // The target goes on.
    let mut room = domain.allocate::<u8>(8).unwrap();
    let mut dci = initiator(&domain, &queues[0]);
    // SAFETY: as above.
    unsafe {
        receives.post_receive(&mut room, .., 5).unwrap();
        dci.batch(|batch| batch.add(SendWorkRequest::new(&piece).to(right), 4)).unwrap();
    }
    assert_eq!(status(&completions(&queues[0], 1)[0]), None);
    assert_eq!(completions(&queues[1], 1)[0].wr_id(), 5);
    // It ends with a connection, and what is sent to it then fails.
    target.close().unwrap();
    // SAFETY: as above.
    unsafe { dci.batch(|batch| batch.add(SendWorkRequest::new(&piece).to(right), 6)).unwrap() };
    assert!(status(&completions(&queues[0], 1)[0]).is_some());
}

#[test]
fn nothing_is_left_and_other_devices_have_none() {
    let network = Network::new();
    let device = device(&network);
    {
        let context = device.open().unwrap();
        let domain = context.alloc_pd().unwrap();
        let queue = context.create_cq(64).unwrap();
        let receives = SharedReceiveQueue::new(&domain, 16, 1).unwrap();
        let target = target(&domain, &queue, &receives, KEY);
        let way = path(&domain, &target.endpoint());
        let region = domain.allocate::<u8>(8).unwrap();
        let piece = [region.gather_element(..).unwrap()];
        let mut dci = initiator(&domain, &queue);
        let to = DcPeer { path: &way, number: target.number(), access_key: KEY, stream: None };
        // No receive: the request stays.
        // SAFETY: the region and the handle outlive the queue pair.
        unsafe { dci.batch(|batch| batch.add(SendWorkRequest::new(&piece).to(to), 1)).unwrap() };
        assert!(queue.poll(&mut [WorkCompletion::default(); 2]).unwrap().is_empty());
        // A post that names no target is refused, as are streams.
        // SAFETY: nothing is posted.
        let error = unsafe {
            dci.batch(|b| {
                b.add(SendWorkRequest::new(&piece).to(DcPeer { stream: Some(1), ..to }), 1)
            })
        };
        assert_eq!(error.unwrap_err().raw_os_error(), Some(libc::EOPNOTSUPP));
    }
    assert_eq!(device.live_objects(), LiveObjects::default());
    let plain = Device::builder().network(&network).build().unwrap();
    let context = plain.open().unwrap();
    assert_eq!(context.query_mlx5().unwrap_err().raw_os_error(), Some(libc::EOPNOTSUPP));
}
