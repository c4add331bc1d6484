//! RC queue pairs, on any device that has them. `crate::transport` connects them: by a handshake, or by the
//! connection manager.
//!
//! These tests post each receive before the peer sends, since on iWARP a message that finds no receive ends
//! the connection. They do without immediate data, atomics and `ibv_wr_*`, which iWARP or its provider does not have.

use std::thread;
use std::time::{Duration, Instant};

use ibverbs::completion::WorkOpcode;
use ibverbs::operation::{PreparedReceive, ReceiveList, SendList};
use ibverbs::{
    AccessFlags, CompletionQueue, Inline, ProtectionDomain, QueuePair, QueuePairBuilder,
    QueuePairState, Rc, ReadWorkRequest, ReceiveWorkRequest, SendWorkRequest, SharedMemoryRegion,
    WorkCompletion, WorkStatus, WriteWorkRequest, operation::PreparedRequest,
};

use crate::transport::{self, Link};
use crate::vm::{PATIENCE, alone, completions, success};

fn builder<'a>(
    domain: &'a ProtectionDomain<'a>,
    queue: &'a CompletionQueue<'a>,
) -> QueuePairBuilder<'a> {
    domain
        .create_qp(queue, queue, Rc)
        .max_send_wr(32)
        .max_recv_wr(32)
        .max_send_sge(4)
        .max_recv_sge(4)
        .max_inline_data(64)
        .access(AccessFlags::REMOTE_READ | AccessFlags::REMOTE_WRITE)
}

/// Two queue pairs that are connected to each other.
fn pair<'a>(
    domain: &'a ProtectionDomain<'a>,
    queue: &'a CompletionQueue<'a>,
) -> (Link<QueuePair<'a>>, Link<QueuePair<'a>>) {
    let new = || builder(domain, queue).build().unwrap();
    transport::queue_pairs(new(), new())
}

fn shared<'a>(domain: &'a ProtectionDomain<'a>) -> SharedMemoryRegion<'a, u64> {
    domain.allocate_shared(16, AccessFlags::REMOTE_READ | AccessFlags::REMOTE_WRITE).unwrap()
}

/// Runs a test with a domain and a queue, and sees that it left nothing.
fn with_device(name: &'static str, test: impl FnOnce(&ProtectionDomain<'_>, &CompletionQueue<'_>)) {
    let _alone = alone(name, 240);
    let context = ibverbs::open(transport::DEVICES[0]).unwrap();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(256).unwrap();
    test(&domain, &queue);
    queue.close().unwrap();
    domain.close().unwrap();
    context.close().unwrap();
    transport::nothing_is_left();
}

/// On iWARP a write has completed when it was sent.
fn until_word_is(region: &SharedMemoryRegion<'_, u64>, index: usize, value: u64) {
    let start = Instant::now();
    while region.read_one(index).unwrap() != value {
        assert!(start.elapsed() < PATIENCE, "{:?}", region.to_vec());
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn messages_of_every_form() {
    with_device("messages", |domain, queue| {
        let mut here = domain.allocate::<u64>(16).unwrap();
        let mut there = domain.allocate::<u64>(64).unwrap();
        let (mut one, mut two) = pair(domain, queue);
        here[..3].copy_from_slice(&[11, 22, 33]);
        // SAFETY: the regions are not touched before the completions.
        unsafe {
            for n in 0..5 {
                let from = n as usize * 8;
                two.post_receive(&mut there, from..from + 8, 100 + n).unwrap();
            }
            let elements = [here.gather_element(..1).unwrap(), here.gather_element(2..3).unwrap()];
            let request = SendWorkRequest::new(&elements);
            one.post(request, 0).unwrap();
            one.post_send(&here, 1..2, 1).unwrap();
            let bytes = [7_u64.to_ne_bytes(), 8_u64.to_ne_bytes()].concat();
            one.post(SendWorkRequest::new(Inline(&bytes)), 2).unwrap();
            let request = SendWorkRequest::new(()).unsignaled();
            one.post(request, 3).unwrap();
            let request = SendWorkRequest::new(&elements).inline().solicited();
            one.post(request, 4).unwrap();
        }
        let done = completions(queue, 9);
        for wr_id in [0, 1, 2, 4] {
            assert_eq!(success(&done, wr_id).opcode(), WorkOpcode::Send);
        }
        let received: Vec<_> = (100..105).map(|n| success(&done, n).byte_len()).collect();
        assert_eq!(received, [16, 8, 16, 0, 16]);
        assert_eq!(success(&done, 100).immediate(), None);
        assert_eq!(
            (&there[..2], there[8], &there[16..18], &there[32..34]),
            (&[11, 33][..], 22, &[7, 8][..], &[11, 33][..])
        );
        assert!(queue.poll(&mut [WorkCompletion::default()]).unwrap().is_empty());
    });
}

#[test]
fn writes_and_reads() {
    with_device("writes and reads", |domain, queue| {
        let mut here = domain.allocate::<u64>(4).unwrap();
        let target = shared(domain);
        // On iWARP a read is a write of the peer, into memory that peers may write.
        let back = shared(domain);
        let remote = target.remote();
        let (mut one, two) = pair(domain, queue);
        here[..3].copy_from_slice(&[11, 22, 33]);
        // SAFETY: `here` is not touched before the completions.
        unsafe {
            one.post_write(&here, ..3, remote, 1).unwrap();
            let elements = [here.gather_element(1..2).unwrap(), here.gather_element(..1).unwrap()];
            let part = remote.sub_region(64, 16).unwrap();
            one.post(WriteWorkRequest::new(&elements, part), 2).unwrap();
            one.post(
                WriteWorkRequest::new(
                    Inline(&7_u64.to_ne_bytes()),
                    remote.sub_region(80, 8).unwrap(),
                ),
                3,
            )
            .unwrap();
            let mut element = [back.scatter_element(..12).unwrap()];
            let part = remote.sub_region(8, 96).unwrap();
            one.post(ReadWorkRequest::new(&mut element, part), 4).unwrap();
        }
        let done = completions(queue, 4);
        for wr_id in 1..=3 {
            assert_eq!(success(&done, wr_id).opcode(), WorkOpcode::Write);
        }
        assert_eq!(success(&done, 4).opcode(), WorkOpcode::Read);
        // A read sees what the same queue pair has written before.
        assert_eq!(target.to_vec(), [11, 22, 33, 0, 0, 0, 0, 0, 22, 11, 7, 0, 0, 0, 0, 0]);
        assert_eq!(back.to_vec(), [22, 33, 0, 0, 0, 0, 0, 22, 11, 7, 0, 0, 0, 0, 0, 0]);
        drop((one, two));
    });
}

#[test]
fn a_request_is_prepared_once_and_posted_often() {
    with_device("prepared once", |domain, queue| {
        let here = domain.allocate::<u64>(1).unwrap();
        let target = shared(domain);
        let (mut one, _two) = pair(domain, queue);
        let element = [here.gather_element(..).unwrap()];
        let write = WriteWorkRequest::new(&element, target.remote());
        for round in 0..4 {
            for n in 0..16 {
                // SAFETY: the memory is not touched before the completions.
                unsafe { one.post(write, round * 16 + n).unwrap() };
            }
            let done = completions(queue, 16);
            let numbers: Vec<_> = done.iter().map(WorkCompletion::wr_id).collect();
            assert_eq!(numbers, (round * 16..round * 16 + 16).collect::<Vec<_>>());
            assert!(done.iter().all(WorkCompletion::is_success));
        }
    });
}

#[test]
fn lists_are_posted_whole_or_up_to_where_they_fail() {
    with_device("lists", |domain, queue| {
        let mut here = domain.allocate::<u64>(8).unwrap();
        let mut there = domain.allocate::<u64>(8).unwrap();
        let target = shared(domain);
        let (mut one, mut two) = pair(domain, queue);
        here.copy_from_slice(&[1, 2, 3, 4, 5, 6, 7, 8]);
        {
            let mut parts: Vec<_> = there.slice_mut(..).unwrap().chunks(1).unwrap().collect();
            let mut lists: Vec<_> =
                parts.iter_mut().map(|part| [part.scatter_element().unwrap()]).collect();
            let receive = |list| PreparedReceive::new(ReceiveWorkRequest::new(list)).unwrap();
            let mut entries: Vec<_> = lists.iter_mut().map(receive).collect();
            let mut receives = ReceiveList::new(&mut entries).unwrap();
            receives.set_wr_ids(100);
            // SAFETY: the regions are not touched before the completions.
            unsafe { two.post_receive_list(&mut receives).unwrap() };
        }
        let elements: [_; 8] = std::array::from_fn(|n| [here.gather_element(n..n + 1).unwrap()]);
        let mut entries = elements
            .each_ref()
            .map(|list| PreparedRequest::new(SendWorkRequest::new(list), 0).unwrap());
        let mut sends = SendList::new(&mut entries).unwrap();
        sends.set_wr_ids(0);
        // SAFETY: as above.
        unsafe { one.post_list(&mut sends).unwrap() };
        let done = completions(queue, 16);
        (0..8).for_each(|n| assert_eq!(success(&done, 100 + n).byte_len(), 8));
        assert_eq!(there[..], here[..]);

        // Soft-iWARP does not mind a few more than the queue pair was built for.
        let many = vec![here.gather_element(..1).unwrap(); one.max_send_sge() as usize + 8];
        let write =
            |list| PreparedRequest::new(WriteWorkRequest::new(list, target.remote()), 0).unwrap();
        let mut entries = [write(&elements[3][..]), write(&many), write(&elements[4])];
        let mut list = SendList::new(&mut entries).unwrap();
        list.set_wr_ids(20);
        // SAFETY: as above.
        let error = unsafe { one.post_list(&mut list) }.unwrap_err();
        assert_eq!(error.posted, 1);
        assert!(error.to_string().contains("gather elements"), "{error}");
        success(&completions(queue, 1), 20);
        until_word_is(&target, 0, 4);
    });
}

#[test]
fn a_queue_that_is_full_refuses_a_post_and_works_on() {
    with_device("full", |domain, queue| {
        let mut there = domain.allocate::<u8>(64).unwrap();
        let (mut one, mut two) = pair(domain, queue);
        let depth = two.max_recv_wr() as u64;
        // SAFETY: the region is not touched before the completions.
        unsafe {
            for n in 0..depth {
                two.post_receive(&mut there, .., n).unwrap();
            }
            // A device may have more room than it says (Soft-RoCE of Linux 6.1).
            let error = (depth..4 * depth).find_map(|n| two.post_receive(&mut there, .., n).err());
            let error = error.expect("it has an end");
            assert_eq!(error.kind(), ibverbs::ErrorKind::QueueFull, "{error}");
            one.post(SendWorkRequest::new(Inline(b"room")), 1000).unwrap();
            let done = completions(queue, 2);
            assert_eq!(success(&done, 0).byte_len(), 4);
            success(&done, 1000);
            two.post_receive(&mut there, .., depth).unwrap();
        }
    });
}

#[test]
fn an_error_flushes_what_is_posted() {
    with_device("flush", |domain, queue| {
        let mut there = domain.allocate::<u8>(64).unwrap();
        let (one, mut two) = pair(domain, queue);
        assert_eq!(two.query().unwrap().state(), Some(QueuePairState::ReadyToSend));
        // SAFETY: the region is not touched before the completions.
        unsafe {
            two.post_receive(&mut there, .., 1).unwrap();
            two.post_receive(&mut there, .., 2).unwrap();
        }
        two.to_error().unwrap();
        for completion in completions(queue, 2) {
            assert_eq!(completion.result().unwrap_err().status(), WorkStatus::Flushed);
        }
        assert_eq!(two.state().unwrap(), QueuePairState::Error);
        drop(one);
    });
}

#[test]
fn a_thread_sleeps_until_a_message_comes() {
    let _alone = alone("sleeping", 240);
    let context = ibverbs::open(transport::DEVICES[0]).unwrap();
    {
        let domain = context.alloc_pd().unwrap();
        let sends = context.create_cq(64).unwrap();
        let receives = CompletionQueue::builder(&context, 64).own_channel().build().unwrap();
        let mut region = domain.allocate::<u8>(64).unwrap();
        let new = || {
            let kind = Rc;
            domain.create_qp(&sends, &receives, kind).max_inline_data(16).build().unwrap()
        };
        let (mut one, mut two) = transport::queue_pairs(new(), new());
        let mut room = [WorkCompletion::default(); 4];
        for round in 0..50 {
            // SAFETY: the region outlives the queue pair, and is not looked at.
            unsafe { two.post_receive(&mut region, .., round).unwrap() };
            thread::scope(|scope| {
                scope.spawn(|| {
                    if round % 8 == 0 {
                        thread::sleep(Duration::from_millis(2));
                    }
                    // SAFETY: no memory is involved.
                    unsafe { one.post(SendWorkRequest::new(Inline(&[1; 9])), 0).unwrap() };
                });
                let found = receives.wait_until(&mut room, Instant::now() + PATIENCE).unwrap();
                assert_eq!((found.len(), found[0].wr_id()), (1, round));
                assert_eq!(found[0].result().unwrap().byte_len(), 9);
            });
            success(&completions(&sends, 1), 0);
        }
    }
    context.close().unwrap();
    transport::nothing_is_left();
}
