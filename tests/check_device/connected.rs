//! Queue pairs of type RC that need nothing but one element in a request: no inline data, no long queues. Each receive is
//! posted before the peer sends, as iWARP wants.

use ibverbs::completion::{CompletionFields, WorkOpcode};
use ibverbs::device::AtomicCapability;
use ibverbs::queue_pair::SendOperations;
use ibverbs::{
    AccessFlags, CompareSwapWorkRequest, CompletionQueue, ErrorKind, FetchAddWorkRequest,
    ProtectionDomain, QueuePair, ReadWorkRequest, SendWorkRequest, SharedMemoryRegion, WorkStatus,
    WriteWorkRequest,
};

use crate::device::{has_reliable, is_iwarp, open, reliable, supported};
use crate::transport::{self, Link, nothing_is_left};
use crate::vm::{alone, completions, success};
use crate::{fault, unsupported};

/// On iWARP a read is a write of the peer, into memory that peers may write.
const ACCESS: AccessFlags = AccessFlags::REMOTE_READ.union(AccessFlags::REMOTE_WRITE);

type Pair<'a> = (Link<QueuePair<'a>>, Link<QueuePair<'a>>);

fn pair<'a>(
    domain: &'a ProtectionDomain<'a>,
    queue: &'a CompletionQueue<'a>,
    access: AccessFlags,
) -> Pair<'a> {
    let new = || reliable(domain, queue).access(access).build().unwrap();
    transport::queue_pairs(new(), new())
}

fn with_device(name: &'static str, test: impl FnOnce(&ProtectionDomain<'_>, &CompletionQueue<'_>)) {
    let _alone = alone(name, 240);
    let context = open();
    if has_reliable(&context) {
        let domain = context.alloc_pd().unwrap();
        let queue = context.create_cq(32).unwrap();
        test(&domain, &queue);
    }
    drop(context);
    nothing_is_left();
}

fn shared<'a>(
    domain: &'a ProtectionDomain<'a>,
    access: AccessFlags,
) -> SharedMemoryRegion<'a, u64> {
    domain.allocate_shared(64, access).unwrap()
}

#[test]
fn carry_messages_of_every_length() {
    with_device("lengths", |domain, queue| {
        const LONGEST: usize = 1 << 20;
        let mut here = domain.allocate::<u8>(LONGEST).unwrap();
        let mut there = domain.allocate::<u8>(LONGEST).unwrap();
        let (mut one, mut two) = pair(domain, queue, ACCESS);
        here.iter_mut().enumerate().for_each(|(index, byte)| *byte = (index * 31 / 7) as u8);
        for length in [1, 2, 255, 256, 257, 1023, 1025, 4095, 4096, 4097, 65_537, LONGEST] {
            there.fill(0);
            // SAFETY: the regions are not touched before the completions.
            unsafe {
                two.post_receive(&mut there, .., 1).unwrap();
                one.post_send(&here, ..length, 2).unwrap();
            }
            let done = completions(queue, 2);
            assert_eq!(success(&done, 1).byte_len() as usize, length);
            assert_eq!(success(&done, 2).opcode(), WorkOpcode::Send);
            assert!(there[..length] == here[..length], "{length} bytes");
        }
    });
}

#[test]
fn write_and_read() {
    with_device("write and read", |domain, queue| {
        let (from, target, back) =
            (shared(domain, ACCESS), shared(domain, ACCESS), shared(domain, ACCESS));
        let (mut one, _two) = pair(domain, queue, ACCESS);
        for round in 1..9 {
            let numbers: Vec<_> = (0..64).map(|n| n * round).collect();
            from.write(0, &numbers).unwrap();
            let element = [from.gather_element(..).unwrap()];
            // SAFETY: the regions are shared, and outlive the completions.
            unsafe { one.post(WriteWorkRequest::new(&element, target.remote()), 1) }.unwrap();
            assert_eq!(success(&completions(queue, 1), 1).opcode(), WorkOpcode::Write);
            let mut element = [back.scatter_element(..).unwrap()];
            // SAFETY: as above.
            unsafe { one.post(ReadWorkRequest::new(&mut element, target.remote()), 2) }.unwrap();
            assert_eq!(success(&completions(queue, 1), 2).opcode(), WorkOpcode::Read);
            assert_eq!(back.to_vec(), numbers);
        }
    });
}

#[test]
fn carry_immediates() {
    with_device("immediates", |domain, queue| {
        if is_iwarp(domain.context()) {
            return unsupported("immediates: iWARP has none");
        }
        let here = domain.allocate::<u64>(1).unwrap();
        let mut there = domain.allocate::<u64>(1).unwrap();
        let (mut one, mut two) = pair(domain, queue, ACCESS);
        let element = [here.gather_element(..).unwrap()];
        // SAFETY: the regions are not touched before the completions.
        unsafe {
            two.post_receive(&mut there, .., 1).unwrap();
            one.post(SendWorkRequest::new(&element).immediate(0xabcd_0123), 2).unwrap();
        }
        let done = completions(queue, 2);
        assert_eq!(success(&done, 1).immediate(), Some(0xabcd_0123));
        success(&done, 2);
    });
}

#[test]
fn count_at_the_peer() {
    with_device("atomics", |domain, queue| {
        if domain.context().query_device().unwrap().atomic_capability() == AtomicCapability::None {
            return unsupported("atomics: the device says so");
        }
        let access = ACCESS | AccessFlags::REMOTE_ATOMIC;
        let (target, old) = (shared(domain, access), shared(domain, access));
        let (mut one, _two) = pair(domain, queue, access);
        let word = target.remote().sub_region(0, 8).unwrap();
        target.write_one(0, 40).unwrap();
        let mut element = old.scatter_element(..1).unwrap();
        // SAFETY: the regions are shared, and outlive the completions.
        unsafe { one.post(FetchAddWorkRequest::new(&mut element, word, 2), 1) }.unwrap();
        success(&completions(queue, 1), 1);
        assert_eq!(old.read_one(0).unwrap(), 40);
        // SAFETY: as above.
        unsafe { one.post(CompareSwapWorkRequest::new(&mut element, word, 42, 7), 2) }.unwrap();
        success(&completions(queue, 1), 2);
        assert_eq!((old.read_one(0).unwrap(), target.read_one(0).unwrap()), (42, 7));
    });
}

/// The peer's memory stays as it was, and the connection ends.
#[test]
fn are_refused_what_the_peer_does_not_allow() {
    with_device("refused", |domain, queue| {
        let (own, closed) = (shared(domain, ACCESS), shared(domain, AccessFlags::LOCAL_WRITE));
        own.write_one(0, 1).unwrap();
        {
            let (mut one, _two) = pair(domain, queue, ACCESS);
            let mut element = [own.scatter_element(..).unwrap()];
            // SAFETY: the regions are shared, and outlive the completions.
            unsafe { one.post(ReadWorkRequest::new(&mut element, closed.remote()), 1) }.unwrap();
            // Which status it is differs by device; iWARP only ends the connection.
            if completions(queue, 1)[0].result().is_ok() {
                fault("peers can read memory that was registered without REMOTE_READ");
            } else {
                assert_eq!(own.read_one(0).unwrap(), 1, "nothing was read");
            }
        }
        let mut room = domain.allocate::<u8>(8).unwrap();
        let (mut one, mut two) = pair(domain, queue, ACCESS);
        own.write_one(0, 1).unwrap();
        let element = [own.gather_element(..).unwrap()];
        // SAFETY: the regions are not touched before the completions.
        unsafe {
            two.post_receive(&mut room, .., 1).unwrap();
            one.post(WriteWorkRequest::new(&element, closed.remote()), 2).unwrap();
        }
        // The write of iWARP has completed when it was sent; the peer's receive ends with the connection.
        let done = completions(queue, 2);
        let received = done.iter().find(|completion| completion.wr_id() == 1).unwrap();
        assert_eq!(received.result().unwrap_err().status(), WorkStatus::Flushed);
        if closed.read_one(0).unwrap() != 0 {
            fault("peers can write memory that was registered without REMOTE_WRITE");
        }
    });
}

#[test]
fn flush_what_is_posted_when_they_fail() {
    with_device("flush", |domain, queue| {
        let mut there = domain.allocate::<u8>(64).unwrap();
        let (_one, mut two) = pair(domain, queue, ACCESS);
        // SAFETY: the region is not touched before the completions.
        unsafe {
            two.post_receive(&mut there, .., 1).unwrap();
            two.post_receive(&mut there, .., 2).unwrap();
        }
        two.to_error().unwrap();
        for completion in completions(queue, 2) {
            assert_eq!(completion.result().unwrap_err().status(), WorkStatus::Flushed);
        }
    });
}

#[test]
fn say_when_a_queue_is_full() {
    with_device("full", |domain, queue| {
        let mut there = domain.allocate::<u8>(64).unwrap();
        let (_one, mut two) = pair(domain, queue, ACCESS);
        let depth = u64::from(two.max_recv_wr());
        // SAFETY: the region is not touched before the queue pair is gone.
        // A device may have more room than it says.
        let last =
            (0..=4 * depth).find_map(|n| unsafe { two.post_receive(&mut there, .., n) }.err());
        assert_eq!(last.expect("it has an end").kind(), ErrorKind::QueueFull);
    });
}

/// Posts with `ibv_wr_*`, and polls an extended completion queue.
#[test]
fn take_batches() {
    with_device("batches", |domain, _| {
        let builder = CompletionQueue::builder(domain.context(), 16);
        let queue = builder.extended(CompletionFields::STANDARD).build();
        let Some(queue) = supported("ibv_create_cq_ex", queue) else { return };
        let new = || reliable(domain, &queue).extended(SendOperations::SEND).build();
        let Some(one) = supported("ibv_wr_*", new()) else { return };
        let (mut one, mut two) = transport::queue_pairs(one, new().unwrap());
        let here = domain.allocate::<u64>(1).unwrap();
        let mut there = domain.allocate::<u64>(2).unwrap();
        let element = [here.gather_element(..).unwrap()];
        // SAFETY: the regions are not touched before the completions.
        unsafe {
            two.post_receive(&mut there, ..1, 1).unwrap();
            two.post_receive(&mut there, 1.., 2).unwrap();
            one.batch(|batch| {
                batch.add(SendWorkRequest::new(&element), 3)?;
                batch.add(SendWorkRequest::new(&element), 4)
            })
            .unwrap();
        }
        let done = completions(&queue, 4);
        (1..5).for_each(|wr_id| assert!(success(&done, wr_id).byte_len() <= 8));
    });
}

#[test]
fn share_their_receives() {
    with_device("shared receives", |domain, queue| {
        if domain.context().query_device().unwrap().max_srq() == 0 {
            return unsupported("shared receive queues: max_srq is 0");
        }
        let Some(receives) = supported("shared receive queues", domain.create_srq(4, 1)) else {
            return;
        };
        let here = domain.allocate::<u64>(1).unwrap();
        let mut there = domain.allocate::<u64>(1).unwrap();
        let new = || reliable(domain, queue).srq(&receives).build().unwrap();
        let (mut one, _two) = transport::queue_pairs(new(), new());
        // SAFETY: the regions are not touched before the completions.
        unsafe {
            receives.post_receive(&mut there, .., 1).unwrap();
            one.post_send(&here, .., 2).unwrap();
        }
        let done = completions(queue, 2);
        assert_eq!(success(&done, 1).byte_len(), 8);
        success(&done, 2);
    });
}
