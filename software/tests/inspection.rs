//! A test learns from a device which objects are left, the calls of verbs, requests in flight, and memory that
//! was deregistered too early; and it makes up events.

use std::io::ErrorKind;
use std::ptr::null_mut;
use std::time::Duration;

use ibverbs::device::{AsyncEventKind, AsyncEventSubject};
use ibverbs::domain::{ThreadDomain, XrcDomain, XrcDomainScope};
use ibverbs::ffi::{self, ibv_access_flags as Access};
use ibverbs::memory::{MemoryWindow, MemoryWindowType};
use ibverbs::{CompletionQueue, ProtectionDomain, Rc, WorkCompletion, queue_pair::AddressVector};
use ibverbs_software::{Device, EventSubject, LiveObjects, Network, Verb, When};

/// A limit in virtual time.
const LONG: Duration = Duration::from_secs(1000);

#[test]
fn live_objects_count_until_they_are_destroyed() {
    let device = Device::new().unwrap();
    assert_eq!(device.live_objects(), LiveObjects::default());
    let context = device.open().unwrap();
    {
        let domain = context.alloc_pd().unwrap();
        let thread = ThreadDomain::new(&context).unwrap();
        // SAFETY: nothing is made with it.
        let parent =
            unsafe { ProtectionDomain::parent_domain(&domain, Some((&thread).into())) }.unwrap();
        let region = domain.allocate::<u8>(8).unwrap();
        let window = domain.alloc_mw(MemoryWindowType::Type2).unwrap();
        let queue = context.create_cq(4).unwrap();
        let receives = domain.create_srq(4, 1).unwrap();
        let kind = Rc;
        let pair = domain.create_qp(&queue, &queue, kind).build().unwrap();
        let path = AddressVector::new(1, 0).global(pair.endpoint().gid(), 0);
        let handle = domain.create_ah(&path).unwrap();
        let memory = context.alloc_dm(64).unwrap();
        let extended = XrcDomain::open(&context, XrcDomainScope::Private).unwrap();
        let LiveObjects {
            contexts,
            protection_domains,
            parent_domains,
            thread_domains,
            memory_regions,
            memory_windows,
            completion_queues,
            shared_receive_queues,
            queue_pairs,
            address_handles,
            device_memory,
            xrc_domains,
            ..
        } = device.live_objects();
        assert_eq!([contexts, protection_domains, parent_domains, thread_domains], [1; 4]);
        assert_eq!([memory_regions, memory_windows, completion_queues], [1; 3]);
        assert_eq!([shared_receive_queues, queue_pairs, address_handles], [1; 3]);
        assert_eq!([device_memory, xrc_domains], [1; 2]);
        let two = [context.create_cq(4).unwrap(), context.create_cq(4).unwrap()];
        assert_eq!(device.live_objects().completion_queues, 3);
        drop((two, handle, window, pair, receives, extended, memory, parent, region));
    }
    let left = device.live_objects();
    assert_eq!((left.contexts, left.protection_domains, left.completion_queues), (1, 0, 0));
    drop(context);
    assert_eq!(device.live_objects(), LiveObjects::default());
}

#[test]
fn calls_count_from_the_moment_that_a_test_asks() {
    let device = Device::new().unwrap();
    let context = device.open().unwrap();
    drop(context.alloc_pd().unwrap());
    assert_eq!(device.calls(Verb::AllocPd), 0);
    device.observe();
    device.let_pass(Verb::AllocPd, 2);
    device.fail(Verb::AllocPd, libc::EIO, When::Before, 1);
    let results = [(); 4].map(|()| context.alloc_pd().is_ok());
    assert_eq!(results, [true, true, false, true]);
    assert_eq!((device.calls(Verb::AllocPd), device.calls(Verb::DeallocPd)), (4, 3));
    device.clear_failures();
    device.observe();
    drop(context.alloc_pd().unwrap());
    assert_eq!(device.calls(Verb::AllocPd), 5, "asking twice changes nothing");
}

#[test]
fn requests_occupy_places_and_name_regions() {
    let network = Network::builder().manual().build();
    let device = network.device().unwrap();
    device.observe();
    let context = device.open().unwrap();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(16).unwrap();
    let kind = Rc;
    let prepared = domain.create_qp(&queue, &queue, kind).max_send_wr(6).max_recv_wr(4);
    let prepared = prepared.build().unwrap();
    let itself = prepared.endpoint();
    let mut pair = prepared.handshake(itself).unwrap();
    let number = pair.number();
    assert_eq!((device.outstanding(number), device.outstanding(number ^ 1)), (Some((0, 0)), None));
    let new = || domain.allocate::<u8>(8).unwrap();
    let [from, mut to, mut unused, bystander] = [new(), new(), new(), new()];
    // SAFETY: the regions outlive the requests, or are deregistered, which this device is made for.
    unsafe {
        pair.post_receive(&mut to, .., 1).unwrap();
        pair.post_receive(&mut unused, .., 2).unwrap();
        pair.post_send(&from, .., 3).unwrap();
    }
    assert_eq!(device.outstanding(number), Some((1, 2)));
    bystander.close().unwrap();
    assert_eq!(device.early_deregistrations(), 0);
    assert!(network.run_until_idle(LONG));
    assert_eq!(device.outstanding(number), Some((1, 2)), "until they are polled");
    // Both were carried out: their memory is free.
    from.close().unwrap();
    to.close().unwrap();
    assert_eq!(device.early_deregistrations(), 0);
    let mut room = [WorkCompletion::default(); 4];
    assert_eq!(queue.poll(&mut room).unwrap().len(), 2);
    assert_eq!(device.outstanding(number), Some((0, 1)));
    unused.close().unwrap();
    assert_eq!(device.early_deregistrations(), 1, "a receive names it");
    let from = new();
    // SAFETY: as above.
    unsafe { pair.post_send(&from, .., 4).unwrap() };
    from.close().unwrap();
    assert_eq!(device.early_deregistrations(), 2, "a send names it");
    // Elements of length 0 name no memory; a window that is to be bound names its region.
    let from = new();
    let mut piece = ffi::ibv_sge { addr: 0, length: 0, lkey: from.lkey() };
    let mut request = ffi::ibv_send_wr {
        sg_list: &mut piece,
        num_sge: 1,
        opcode: ffi::ibv_wr_opcode::IBV_WR_SEND,
        ..Default::default()
    };
    // SAFETY: the queue pair is live, and the request names no memory.
    let errno = unsafe { ffi::ibv_post_send(pair.as_raw(), &mut request, &mut null_mut()) };
    assert_eq!(errno, 0);
    from.close().unwrap();
    assert_eq!(device.early_deregistrations(), 2);
    let window = MemoryWindow::new(&domain, MemoryWindowType::Type2).unwrap();
    let mut memory = [0_u64];
    let start = memory.as_mut_ptr();
    let rights = Access::IBV_ACCESS_LOCAL_WRITE | Access::IBV_ACCESS_MW_BIND;
    // Both are behind a READ of nothing, which has no answer yet. The first ends a binding, and was carried out; the second
    // waits for the answer.
    let fence = ffi::ibv_send_flags::IBV_SEND_FENCE.0;
    for (send_flags, length, expected) in [(0, 0, 2), (fence, 8, 3)] {
        let mut request = ffi::ibv_send_wr {
            opcode: ffi::ibv_wr_opcode::IBV_WR_BIND_MW,
            send_flags,
            ..Default::default()
        };
        let mut read =
            ffi::ibv_send_wr { opcode: ffi::ibv_wr_opcode::IBV_WR_RDMA_READ, ..Default::default() };
        // SAFETY: the memory lives longer than the region, and the objects are live when the request is posted.
        unsafe {
            let region = ffi::ibv_reg_mr(domain.as_raw(), start.cast(), 8, rights.0 as i32);
            assert!(!region.is_null());
            let bind = &mut request.__bindgen_anon_2.bind_mw;
            (bind.mw, bind.rkey) = (window.as_raw(), ffi::ibv_inc_rkey(window.rkey()));
            bind.bind_info.mr = region;
            (bind.bind_info.addr, bind.bind_info.length) = (start as u64, length);
            read.next = &mut request;
            assert_eq!(ffi::ibv_post_send(pair.as_raw(), &mut read, &mut null_mut()), 0);
            assert_eq!(ffi::ibv_dereg_mr(region), 0);
        }
        assert_eq!(device.early_deregistrations(), expected, "of a window: flags {send_flags}");
    }
    pair.close().unwrap();
    assert_eq!(device.outstanding(number), None);
}

#[test]
fn a_made_up_event_is_about_what_the_standard_says() {
    let device = Device::new().unwrap();
    let (context, other) = (device.open().unwrap(), device.open().unwrap());
    let queue = CompletionQueue::builder(&context, 4).token(7).build().unwrap();
    let events = [context.async_events().unwrap(), other.async_events().unwrap()];
    device.make_up_event(AsyncEventKind::PkeyChange, EventSubject::Port(9)).unwrap();
    for events in &events {
        let event = events.wait().unwrap();
        let expected = (AsyncEventKind::PkeyChange, AsyncEventSubject::Port(9));
        assert_eq!((event.kind(), event.subject()), expected);
    }
    let about = EventSubject::CompletionQueue(queue.as_raw());
    device.make_up_event(AsyncEventKind::CompletionQueueError, about).unwrap();
    assert_eq!(events[0].wait().unwrap().subject(), AsyncEventSubject::CompletionQueue(7));
    assert_eq!(events[1].next_event().unwrap(), None, "it is of the other context");

    let refused = |kind, subject| device.make_up_event(kind, subject).unwrap_err().kind();
    // A program would follow these numbers as pointers.
    for subject in [EventSubject::Port(1), EventSubject::Device, EventSubject::Other(1), about] {
        assert_eq!(refused(AsyncEventKind::QueuePairFatal, subject), ErrorKind::InvalidInput);
        assert_eq!(refused(AsyncEventKind::Unknown(1), subject), ErrorKind::InvalidInput);
        assert_eq!(refused(AsyncEventKind::WorkQueueFatal, subject), ErrorKind::InvalidInput);
    }
    assert_eq!(refused(AsyncEventKind::Unknown(77), about), ErrorKind::InvalidInput);
    let missing = EventSubject::QueuePair(0xff_ffff);
    assert_eq!(refused(AsyncEventKind::QueuePairFatal, missing), ErrorKind::NotFound);
    let missing = EventSubject::SharedReceiveQueue(queue.as_raw().cast());
    assert_eq!(refused(AsyncEventKind::SharedReceiveQueueError, missing), ErrorKind::NotFound);
    for events in &events {
        assert_eq!(events.next_event().unwrap(), None);
    }
}
