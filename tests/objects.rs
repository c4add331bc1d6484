//! Shared receive queues, domains of all kinds, multicast, ECE and the clock, on a device made of
//! functions: the arguments that the provider receives, and the handling of its answers.

use std::alloc::Layout;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex};

use ibverbs::completion::WorkOpcode;
use ibverbs::device::{ForkStatus, fork_init, is_fork_initialized};
use ibverbs::domain::{Allocation, Allocator, ThreadDomain, XrcDomain, XrcDomainScope};
use ibverbs::memory::{
    DeviceMemory, ImplicitMemoryRegion, MemoryWindow, MemoryWindowType, NullMemoryRegion,
    RawMemoryRegion,
};
use ibverbs::queue_pair::AddressVector;
use ibverbs::queue_pair::{
    EnhancedConnection, OpenedQueuePair, StateTransition, Tag, TagListSize, TagOperation,
    XrcReceive,
};
use ibverbs::*;
use ibverbs_function_device::{Builder, FunctionDevice, Kind};

#[test]
fn a_shared_receive_queue_is_created_queried_and_modified() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = domain.create_srq(17, 2).unwrap();
    let call = device.last_call("create_srq").unwrap();
    let attributes = call.srq_init_attr.attr;
    assert_eq!((attributes.max_wr, attributes.max_sge, attributes.srq_limit), (17, 2, 0));
    assert!(queue.max_wr() >= 17 && queue.max_sge() >= 2);

    queue.set_limit(5).unwrap();
    assert_eq!(queue.query().unwrap().limit, 5);
    let error = queue.set_limit(queue.max_wr() + 1).unwrap_err();
    assert!(error.to_string().contains("the limit is"), "{error}");
    queue.resize(40).unwrap();
    assert!(queue.max_wr() >= 40);

    for (wr, sge, what) in [(0, 1, "max_wr"), (u32::MAX, 1, "max_wr"), (1, 0, "max_sge")] {
        let error = domain.create_srq(wr, sge).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
        assert!(error.to_string().contains(what), "{error}");
    }
    queue.close().unwrap();
    drop(domain);
    drop(context);
    device.assert_clean();
}

#[test]
fn a_shared_receive_queue_fills_up() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = domain.create_srq(1, 1).unwrap();
    let mut region = domain.allocate::<u8>(64).unwrap();
    let mut posted = 0;
    let error = loop {
        // SAFETY: the region outlives the queue and is not touched.
        match unsafe { queue.post_receive(&mut region, 8..24, posted) } {
            Ok(()) => posted += 1,
            Err(error) => break error,
        }
        assert!(posted <= u64::from(queue.max_wr()), "more than it has room for");
    };
    assert_eq!((error.kind(), posted), (ErrorKind::QueueFull, u64::from(queue.max_wr())));
    let request = device.posted(0).unwrap();
    let address = region.as_ptr() as u64 + 8;
    assert_eq!((request.receive, request.list), (true, vec![(address, 16, region.lkey())]));
    queue.close().unwrap();
}

#[test]
fn a_parent_domain_keeps_what_it_stands_for() {
    let device = FunctionDevice::model();
    let context = Arc::new(device.context());
    let thread = Arc::new(ThreadDomain::new(&context).unwrap());
    let domain = Arc::new(ProtectionDomain::new(&context).unwrap());
    // SAFETY: nothing is created with the domain.
    let parent =
        unsafe { ProtectionDomain::parent_domain(&domain, Some((&thread).into())) }.unwrap();
    assert_eq!(parent.base().unwrap().as_raw(), domain.as_raw());
    let call = device.last_call("alloc_parent_domain").unwrap();
    let attributes = call.parent_domain_attr;
    assert_eq!((attributes.pd, attributes.td), (domain.as_raw(), thread.as_raw()));
    drop((domain, thread, context));
    assert_eq!((device.live(Kind::ProtectionDomain), device.live(Kind::ThreadDomain)), (2, 1));
    parent.close().unwrap();
    device.assert_clean();
}

/// Memory from the system's allocator, with a record of what was asked for.
#[derive(Default)]
struct Recorder {
    asked: Mutex<Vec<(Layout, u64)>>,
    given: Mutex<Vec<usize>>,
    answer: Mutex<Answer>,
}

#[derive(Clone, Copy, Default, PartialEq)]
enum Answer {
    #[default]
    Memory,
    Default,
    Failed,
    Panic,
}

const BUFFER: Layout = match Layout::from_size_align(8192, 4096) {
    Ok(layout) => layout,
    Err(_) => unreachable!(),
};

// SAFETY: the memory is zeroed, of that layout, and valid until it is freed. Nothing forks here.
unsafe impl Allocator for &Recorder {
    fn alloc(&self, layout: Layout, resource_type: u64) -> Allocation {
        self.asked.lock().unwrap().push((layout, resource_type));
        let answer = *self.answer.lock().unwrap();
        match answer {
            Answer::Default => return Allocation::Default,
            Answer::Failed => return Allocation::Failed,
            Answer::Panic => panic!("an allocator that panics"),
            Answer::Memory => {}
        }
        // SAFETY: the device asks for more than 0 bytes.
        let memory = unsafe { std::alloc::alloc_zeroed(layout) };
        self.given.lock().unwrap().push(memory as usize);
        NonNull::new(memory).map_or(Allocation::Failed, Allocation::Memory)
    }

    unsafe fn free(&self, memory: NonNull<u8>, layout: Layout, resource_type: u64) {
        assert_eq!((layout, resource_type), (BUFFER, 0x5501));
        let mut given = self.given.lock().unwrap();
        let at = given.iter().position(|&other| other == memory.as_ptr() as usize).unwrap();
        given.swap_remove(at);
        // SAFETY: `alloc` has allocated it, with this layout.
        unsafe { std::alloc::dealloc(memory.as_ptr(), layout) };
        if *self.answer.lock().unwrap() == Answer::Panic {
            panic!("an allocator that panics");
        }
    }
}

#[test]
fn a_parent_domain_takes_memory_from_an_allocator() {
    let device = FunctionDevice::model();
    let recorder = Recorder::default();
    let context = device.context();
    let base = context.alloc_pd().unwrap();
    let queue = context.create_cq(4).unwrap();
    // SAFETY: there is no thread domain.
    let domain =
        unsafe { ProtectionDomain::parent_domain_with_allocator(&base, None, &recorder) }.unwrap();
    let call = device.last_call("alloc_parent_domain").unwrap().parent_domain_attr;
    assert_eq!((call.pd, call.comp_mask), (base.as_raw(), 3));
    assert!(call.td.is_null() && !call.pd_context.is_null());
    let new = || domain.create_qp(&queue, &queue, Rc).build();

    let pair = new().unwrap();
    assert_eq!(*recorder.asked.lock().unwrap(), [(BUFFER, 0x5501)]);
    assert_eq!(recorder.given.lock().unwrap().len(), 1);
    pair.close().unwrap();
    assert!(recorder.given.lock().unwrap().is_empty());

    for (answer, created) in
        [(Answer::Default, true), (Answer::Failed, false), (Answer::Panic, false)]
    {
        *recorder.answer.lock().unwrap() = answer;
        match new() {
            Ok(_) => assert!(created),
            Err(error) => assert_eq!((created, error.raw_os_error()), (false, Some(libc::ENOMEM))),
        }
        assert!(recorder.given.lock().unwrap().is_empty());
    }
    // A panic while memory is given back ends in the allocator.
    *recorder.answer.lock().unwrap() = Answer::Memory;
    let pair = new().unwrap();
    *recorder.answer.lock().unwrap() = Answer::Panic;
    pair.close().unwrap();
    domain.close().unwrap();
    device.fail("alloc_parent_domain").errno(libc::EOPNOTSUPP).times(1);
    // SAFETY: as above.
    let error = unsafe { ProtectionDomain::parent_domain_with_allocator(&base, None, &recorder) };
    assert_eq!(error.unwrap_err().kind(), ErrorKind::Unsupported);
    assert_eq!(device.violations().0, 0, "{}", device.violations().1);
}

/// Objects that could not be destroyed may still use the allocator: it is leaked with the domain.
#[test]
fn an_allocator_lives_as_long_as_what_may_use_it() {
    struct Forwarding(Arc<Recorder>);
    // SAFETY: that of the recorder.
    unsafe impl Allocator for Forwarding {
        fn alloc(&self, layout: Layout, resource_type: u64) -> Allocation {
            (&*self.0).alloc(layout, resource_type)
        }

        unsafe fn free(&self, memory: NonNull<u8>, layout: Layout, resource_type: u64) {
            // SAFETY: the caller vouches for it.
            unsafe { (&*self.0).free(memory, layout, resource_type) }
        }
    }

    for fails in [false, true] {
        let device = FunctionDevice::model();
        let recorder = Arc::new(Recorder::default());
        let context = device.context();
        let base = context.alloc_pd().unwrap();
        let allocator = Forwarding(Arc::clone(&recorder));
        // SAFETY: there is no thread domain.
        let domain = unsafe {
            ProtectionDomain::parent_domain_with_allocator(&base, None, allocator).unwrap()
        };
        if fails {
            device.fail("dealloc_pd").errno(libc::EBUSY).times(1);
        }
        assert_eq!(domain.close().is_err(), fails);
        assert_eq!(Arc::strong_count(&recorder), 1 + usize::from(fails));
    }
}

#[test]
fn a_receiving_xrc_queue_pair_is_opened_by_its_number() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(4).unwrap();
    let xrc = XrcDomain::open(&context, XrcDomainScope::Private).unwrap();
    let builder = domain.create_qp(&queue, &queue, XrcReceive);
    let original = builder.xrc_domain(&xrc).build().unwrap();
    let number = original.endpoint().num();

    let mut opened = OpenedQueuePair::open(&xrc, number).unwrap();
    let call = device.last_call("open_qp").unwrap().open_attr;
    assert_eq!((call.comp_mask, call.qp_num, call.xrcd), (1 | 2 | 8, number, xrc.as_raw()));
    assert_eq!(call.qp_type, ffi::ibv_qp_type::IBV_QPT_XRC_RECV);
    assert_eq!((opened.number(), opened.xrc_domain().as_raw()), (number, xrc.as_raw()));
    assert_eq!(opened.state().unwrap(), QueuePairState::Reset);
    let init = StateTransition::to(QueuePairState::Init).port(1).pkey_index(0);
    let error = opened.modify(init).unwrap_err();
    assert!(error.to_string().contains("qp_access_flags is missing"), "{error}");
    opened.modify(init.access(AccessFlags::REMOTE_WRITE)).unwrap();
    assert_eq!(opened.state().unwrap(), QueuePairState::Init);
    opened.close().unwrap();

    let calls = device.calls("open_qp");
    let error = OpenedQueuePair::open(&xrc, 1 << 24).unwrap_err();
    assert_eq!((error.verb(), device.calls("open_qp")), ("ibv_open_qp", calls));
    let error = OpenedQueuePair::open(&xrc, number + 1).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    device.fail("open_qp").errno(libc::EOPNOTSUPP).times(1);
    assert_eq!(OpenedQueuePair::open(&xrc, number).unwrap_err().kind(), ErrorKind::Unsupported);
}

#[test]
fn tags_of_a_shared_receive_queue_are_added_removed_and_synchronized() {
    let device = FunctionDevice::model();
    let (context, other) = (device.context(), device.context());
    let domain = context.alloc_pd().unwrap();
    let completions = context.create_cq(16).unwrap();
    let mut region = domain.allocate::<u8>(64).unwrap();
    let (address, lkey) = (region.as_ptr() as u64, region.lkey());
    let size = TagListSize { max_tags: 2, max_operations: 8 };
    let queue = SharedReceiveQueue::with_tag_matching(&domain, &completions, 4, 1, size).unwrap();
    let call = device.last_call("create_srq_ex").unwrap().srq_init_attr;
    assert_eq!(call.comp_mask, 1 | 2 | 8 | 16);
    assert_eq!(call.srq_type, ffi::ibv_srq_type::IBV_SRQT_TM);
    assert_eq!(
        (call.pd, call.cq, call.xrcd.is_null()),
        (domain.as_raw(), completions.as_raw(), true)
    );
    assert_eq!((call.tm_cap.max_num_tags, call.tm_cap.max_ops), (2, 8));

    let tag = Tag { value: 0xab00, mask: 0xff00 };
    let mut elements = [region.scatter_element(8..24).unwrap()];
    // SAFETY: the region is not touched, and outlives the queue.
    let handle =
        unsafe { queue.post_tag_add(tag, &mut elements, 77, TagOperation::new(1)) }.unwrap();
    let call = device.last_call("post_srq_ops").unwrap();
    let (ops, add) = (call.ops, call.ops.tm.add);
    let opcode = ffi::ibv_ops_wr_opcode::IBV_WR_TAG_ADD;
    assert_eq!((ops.wr_id, ops.opcode, ops.flags), (1, opcode, 1));
    assert_eq!((add.recv_wr_id, add.num_sge, add.tag, add.mask), (77, 1, 0xab00, 0xff00));
    let sge = call.ops_sge;
    assert_eq!((sge.addr, sge.length, sge.lkey), (address + 8, 16, lkey));

    let operation = TagOperation { wr_id: 2, signaled: false, unexpected: Some(9) };
    // SAFETY: as above.
    let second = unsafe { queue.post_tag_add(tag, &mut [], 78, operation) }.unwrap();
    assert_ne!(handle, second);
    let ops = device.last_call("post_srq_ops").unwrap().ops;
    assert_eq!((ops.flags, ops.tm.unexpected_cnt, ops.tm.add.num_sge), (2, 9, 0));
    // SAFETY: as above.
    unsafe {
        let error = queue.post_tag_add(tag, &mut [], 79, TagOperation::new(3)).unwrap_err();
        assert_eq!((error.verb(), error.kind()), ("ibv_post_srq_ops", ErrorKind::QueueFull));
        queue.post_tag_remove(handle, TagOperation::new(4)).unwrap();
        let ops = device.last_call("post_srq_ops").unwrap().ops;
        assert_eq!((ops.opcode, ops.flags), (ffi::ibv_ops_wr_opcode::IBV_WR_TAG_DEL, 1));
        queue.post_tag_sync(TagOperation { unexpected: Some(10), ..TagOperation::new(5) }).unwrap();
        let ops = device.last_call("post_srq_ops").unwrap().ops;
        let opcode = ffi::ibv_ops_wr_opcode::IBV_WR_TAG_SYNC;
        assert_eq!((ops.opcode, ops.flags, ops.tm.unexpected_cnt), (opcode, 3, 10));
    }
    let mut slice = [WorkCompletion::default(); 8];
    let done: Vec<_> = completions
        .poll(&mut slice)
        .unwrap()
        .iter()
        .map(|done| (done.wr_id(), done.result().unwrap().opcode()))
        .collect();
    assert_eq!(
        done,
        [(1, WorkOpcode::TagAdd), (4, WorkOpcode::TagDelete), (5, WorkOpcode::TagSync)]
    );

    // These requests are refused before the device sees them.
    let calls = device.calls("post_srq_ops");
    let plain = domain.create_srq(4, 1).unwrap();
    let mut more = domain.allocate::<u8>(8).unwrap();
    let mut two = [region.scatter_element(..8).unwrap(), more.scatter_element(..8).unwrap()];
    // SAFETY: as above.
    unsafe {
        for (error, what) in [
            (plain.post_tag_add(tag, &mut [], 1, operation).unwrap_err(), "no list of tags"),
            (plain.post_tag_sync(operation).unwrap_err(), "no list of tags"),
            (
                queue.post_tag_add(Tag { value: 1, mask: 2 }, &mut [], 1, operation).unwrap_err(),
                "not in its mask",
            ),
            (
                queue.post_tag_add(tag, &mut two, 1, operation).unwrap_err(),
                "scatter elements is 2, and must be within 0..=1",
            ),
            (queue.post_tag_sync(TagOperation::new(1)).unwrap_err(), "unexpected messages"),
        ] {
            assert!(error.to_string().contains(what), "{error}");
        }
    }
    assert_eq!(device.calls("post_srq_ops"), calls);
    let foreign = other.create_cq(4).unwrap();
    let error = SharedReceiveQueue::with_tag_matching(&domain, &foreign, 4, 1, size).unwrap_err();
    assert!(error.to_string().contains("another context"), "{error}");
    for (max_tags, max_operations, what) in
        [(0, 1, "max_tags is 0"), (65, 1, "max_tags is 65"), (1, 33, "max_operations is 33")]
    {
        let size = TagListSize { max_tags, max_operations };
        let error =
            SharedReceiveQueue::with_tag_matching(&domain, &completions, 4, 1, size).unwrap_err();
        assert!(error.to_string().contains(what), "{error}");
    }
    queue.close().unwrap();
}

#[test]
fn a_thread_domain_of_another_context_is_refused() {
    let device = FunctionDevice::model();
    let (context, other) = (device.context(), device.context());
    let domain = context.alloc_pd().unwrap();
    let thread = ThreadDomain::new(&other).unwrap();
    // SAFETY: nothing is created with the domain.
    let error = unsafe { ProtectionDomain::parent_domain(&domain, Some((&thread).into())) };
    assert!(error.unwrap_err().to_string().contains("another context"));
    assert!(domain.base().is_none());
    thread.close().unwrap();
}

#[test]
fn an_xrc_domain_is_private_or_stands_for_a_file() {
    let device = FunctionDevice::model();
    let context = device.context();
    let file = File::open("/dev/null").unwrap();
    let fd = file.as_fd();
    for (scope, expected) in [
        (XrcDomainScope::Private, (-1, libc::O_CREAT)),
        (XrcDomainScope::File(fd), (fd.as_raw_fd(), libc::O_CREAT)),
        (XrcDomainScope::NewFile(fd), (fd.as_raw_fd(), libc::O_CREAT | libc::O_EXCL)),
        (XrcDomainScope::ExistingFile(fd), (fd.as_raw_fd(), 0)),
    ] {
        let domain = XrcDomain::open(&context, scope).unwrap();
        let call = device.last_call("open_xrcd").unwrap();
        let attributes = call.xrcd_attr;
        assert_eq!(
            (attributes.fd, attributes.oflags, attributes.comp_mask),
            (expected.0, expected.1, 3)
        );
        domain.close().unwrap();
    }
    device.fail("open_xrcd").errno(libc::EOPNOTSUPP).times(1);
    let error = XrcDomain::open(&context, XrcDomainScope::Private).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    // The kernel's answers if there is an export, and if there is none.
    for (scope, errno, text) in [
        (XrcDomainScope::NewFile(fd), libc::EINVAL, "an XRC domain already"),
        (XrcDomainScope::ExistingFile(fd), libc::EAGAIN, "no XRC domain"),
    ] {
        device.fail("open_xrcd").errno(errno).times(1);
        let error = XrcDomain::open(&context, scope).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(errno));
        assert!(error.to_string().ends_with(text), "{error}");
    }
}

#[test]
fn ece_options_go_both_ways() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(4).unwrap();
    let prepared = domain.create_qp(&queue, &queue, Rc).build().unwrap();
    let mut queue_pair = prepared.into_queue_pair();
    let offered = queue_pair.query_ece().unwrap();
    let wanted = EnhancedConnection { vendor_id: 0x15b3, options: offered.options | 0x30 };
    queue_pair.set_ece(wanted).unwrap();
    assert_eq!(queue_pair.query_ece().unwrap(), wanted);
    device.fail("query_ece").errno(libc::EOPNOTSUPP).times(1);
    assert_eq!(queue_pair.query_ece().unwrap_err().kind(), ErrorKind::Unsupported);
}

#[test]
fn the_raw_clock_is_passed_on() {
    let device = FunctionDevice::model();
    let context = device.context();
    let before = context.query_raw_clock().unwrap();
    let after = context.query_raw_clock().unwrap();
    assert!((after.seconds, after.nanoseconds) >= (before.seconds, before.nanoseconds));
    device.fail("query_rt_values").errno(libc::EOPNOTSUPP).times(1);
    assert_eq!(context.query_raw_clock().unwrap_err().kind(), ErrorKind::Unsupported);
}

#[test]
fn multicast_wants_a_datagram_queue_pair_and_a_group() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(4).unwrap();
    let group: Gid = "ff0e::1:2:3".parse().unwrap();
    let make = |queue_pair_type| {
        domain.create_qp(&queue, &queue, queue_pair_type).build().unwrap().into_queue_pair()
    };
    let mut datagram = make(QueuePairType::UnreliableDatagram);
    datagram.attach_multicast(group, 0).unwrap();
    assert!(datagram.attach_multicast("10::1".parse().unwrap(), 0).is_err());
    datagram.detach_multicast(group, 0).unwrap();
    assert!(datagram.detach_multicast(group, 0).is_err(), "it left already");
    assert_eq!(device.calls("detach_mcast"), 2);
    datagram.close().unwrap();
    // The kernel does not destroy a queue pair that is still attached.
    for closed in [true, false] {
        let mut datagram = make(QueuePairType::UnreliableDatagram);
        datagram.attach_multicast(group, 0).unwrap();
        datagram.attach_multicast("ff0e::9".parse().unwrap(), 0).unwrap();
        if closed {
            datagram.close().unwrap()
        } else {
            drop(datagram)
        }
        assert_eq!(device.live(Kind::QueuePair), 0);
    }
    assert_eq!(device.calls("detach_mcast"), 6);
    let mut connected = make(QueuePairType::ReliableConnected);
    let error = connected.attach_multicast(group, 0).unwrap_err();
    assert!(error.to_string().contains("only UD"), "{error}");
}

#[test]
fn an_extended_shared_receive_queue_has_a_domain_a_queue_and_a_number() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(4).unwrap();
    let xrc_domain = XrcDomain::open(&context, XrcDomainScope::Private).unwrap();
    let receives = SharedReceiveQueue::extended(&domain, &xrc_domain, &queue, 5, 1).unwrap();
    let attributes = device.last_call("create_srq_ex").unwrap().srq_init_attr;
    assert_eq!(attributes.srq_type, ffi::ibv_srq_type::IBV_SRQT_XRC);
    assert_eq!((attributes.attr.max_wr, attributes.attr.max_sge), (5, 1));
    let handed_over = (attributes.pd, attributes.xrcd, attributes.cq);
    assert_eq!(handed_over, (domain.as_raw(), xrc_domain.as_raw(), queue.as_raw()));
    receives.number().unwrap();

    let other = device.context();
    let other_queue = other.create_cq(4).unwrap();
    let error = SharedReceiveQueue::extended(&domain, &xrc_domain, &other_queue, 5, 1).unwrap_err();
    assert!(error.to_string().contains("another context"), "{error}");
    receives.close().unwrap();
    xrc_domain.close().unwrap();
}

#[test]
fn a_request_with_too_many_elements_is_named() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let receives = domain.create_srq(4, 1).unwrap();
    let mut region = domain.allocate::<u8>(64).unwrap();
    let parts = region.slice_mut(..).unwrap().chunks(1).unwrap();
    let mut elements: Vec<_> = parts.map(|part| part.into_scatter_element().unwrap()).collect();
    let most = receives.max_sge() as usize;
    let request = ReceiveWorkRequest::new(&mut elements[..most + 1]);
    // SAFETY: nothing is posted.
    let error = unsafe { receives.post(request, 1) }.unwrap_err();
    assert!(error.to_string().contains("the number of scatter elements is"), "{error}");
    drop(elements);
    receives.close().unwrap();
}

#[test]
fn an_address_handle_names_a_port_of_the_device() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let path = |port| AddressVector::new(port, 0).global(context.routable_gid(1).unwrap().gid, 1);
    for port in [0, 99] {
        // The errno that an earlier call left, which must not be reported if a provider sets none.
        device.fail("create_ah").errno(libc::EAGAIN).times(1);
        let error = domain.create_ah(&path(port)).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EINVAL));
        assert!(error.to_string().contains(&format!("port number is {port}")), "{error}");
    }
    device.fail("create_ah").errno(libc::ENOMEM).times(1);
    let error = domain.create_ah(&path(1)).unwrap_err();
    assert_eq!((error.verb(), error.raw_os_error()), ("ibv_create_ah", Some(libc::ENOMEM)));
    domain.create_ah(&path(1)).unwrap().close().unwrap();
}

#[test]
fn the_path_to_a_peer_has_what_the_network_needs() {
    let endpoint = |lid, gid: &str| QueuePairEndpoint::new(7, lid, gid.parse().unwrap()).unwrap();
    let roce = endpoint(0, "::ffff:10.0.0.9");
    let infiniband = endpoint(9, "fe80::9");

    let device = FunctionDevice::model();
    let context = device.context();
    let own = context.routable_gid(1).unwrap();
    let path = AddressVector::to_peer(&context, 1, &roce).unwrap();
    let index = u8::try_from(own.index).unwrap();
    assert_eq!((path.port(), path.lid(), path.gid()), (1, 0, Some(roce.gid())));
    assert_eq!(path.source_gid_index(), Some(index));
    context.alloc_pd().unwrap().create_ah(&path).unwrap().close().unwrap();
    let error = AddressVector::to_peer(&context, 1, &endpoint(9, "::")).unwrap_err();
    assert_eq!(error.verb(), "ibv_create_ah");
    assert!(error.to_string().contains("no GID"), "{error}");
    let error = AddressVector::to_peer(&context, 2, &roce).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EINVAL));

    let device =
        Builder::model().link_layer(ibverbs_function_device::LinkLayer::InfiniBand).build();
    let context = device.context();
    let path = AddressVector::to_peer(&context, 1, &infiniband).unwrap();
    assert_eq!((path.lid(), path.gid()), (9, None));
    let error = AddressVector::to_peer(&context, 1, &roce).unwrap_err();
    assert!(error.to_string().contains("no LID"), "{error}");
    device.change_port(1, |port| port.flags |= 1); // IBV_QPF_GRH_REQUIRED
    let path = AddressVector::to_peer(&context, 1, &infiniband).unwrap();
    assert_eq!(
        (path.lid(), path.gid(), path.source_gid_index()),
        (9, Some(infiniband.gid()), Some(0))
    );
}

/// libibverbs prepares for forks without a lock, so nobody may register memory meanwhile.
#[test]
fn forks_are_announced_before_a_device_is_opened() {
    let device = FunctionDevice::model();
    let _context = device.context();
    match is_fork_initialized() {
        ForkStatus::Disabled => {
            let error = fork_init().unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::EINVAL));
            assert!(error.to_string().contains("before any device is opened"), "{error}");
        }
        _ => fork_init().expect("there is nothing to do"),
    }
}

/// Objects as a C library would make them: `from_raw` refuses the wrong parent, and takes over the object
/// with the right one.
#[test]
fn objects_of_c_are_taken_over() {
    let device = Builder::model().limits(|limits| limits.on_demand = 1).build();
    let (context, other) = (device.context(), device.context());
    let (domain, foreign) = (context.alloc_pd().unwrap(), context.alloc_pd().unwrap());
    let pd = domain.as_raw();
    let mut bytes = [0x55_u8; 64];

    // SAFETY: every object is live, made in the domain or the context that it is said to be of, and
    // handed over once: where it is refused it was not.
    unsafe {
        let mut wanted = ffi::ibv_srq_init_attr {
            attr: ffi::ibv_srq_attr { max_wr: 9, max_sge: 2, srq_limit: 0 },
            ..Default::default()
        };
        let raw = ffi::ibv_create_srq(pd, &mut wanted);
        assert!(SharedReceiveQueue::from_raw(raw, &foreign).is_err());
        assert!(SharedReceiveQueue::from_raw(std::ptr::null_mut(), &domain).is_err());
        device.fail("query_srq").errno(libc::ENOSYS).times(1);
        let error = SharedReceiveQueue::from_raw(raw, &domain).unwrap_err();
        assert_eq!(error.verb(), "ibv_query_srq");
        let queue = SharedReceiveQueue::from_raw(raw, &domain).unwrap();
        assert_eq!((queue.as_raw(), queue.max_wr(), queue.max_sge()), (raw, 9, 2));
        let mut region = domain.allocate::<u8>(64).unwrap();
        queue.post_receive(&mut region, .., 1).unwrap();
        queue.close().unwrap();

        let path = AddressVector::new(1, 0).global(context.routable_gid(1).unwrap().gid, 1);
        let raw = ffi::ibv_create_ah(pd, &mut path.to_raw());
        assert!(AddressHandle::from_raw(raw, &foreign).is_err());
        assert!(AddressHandle::from_raw(std::ptr::null_mut(), &domain).is_err());
        AddressHandle::from_raw(raw, &domain).unwrap().close().unwrap();

        for kind in [MemoryWindowType::Type1, MemoryWindowType::Type2] {
            let raw = ffi::ibv_alloc_mw(pd, kind.into());
            assert!(MemoryWindow::from_raw(raw, &foreign).is_err());
            assert!(MemoryWindow::from_raw(std::ptr::null_mut(), &domain).is_err());
            let window = MemoryWindow::from_raw(raw, &domain).unwrap();
            assert_eq!((window.window_type(), window.rkey()), (kind, (*raw).rkey));
            window.close().unwrap();
        }

        let access = AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_READ;
        let address = bytes.as_mut_ptr();
        let register = |iova| ffi::ibv_reg_mr_iova2(pd, address.cast(), 64, iova, access.bits());
        let raw = register(address as u64);
        let none = std::ptr::null_mut();
        assert!(RawMemoryRegion::from_raw(raw, 0, access, &foreign).is_err());
        assert!(RawMemoryRegion::from_raw(raw, u64::MAX - 3, access, &domain).is_err());
        assert!(RawMemoryRegion::from_raw(none, 0, access, &domain).is_err());
        let region = RawMemoryRegion::from_raw(raw, address as u64, access, &domain).unwrap();
        assert_eq!((region.as_ptr(), region.len(), region.access()), (address, 64, access));
        assert_eq!((region.lkey(), region.rkey()), ((*raw).lkey, (*raw).rkey));
        assert_eq!(region.remote_range(8..).unwrap().address(), address as u64 + 8);
        region.close().unwrap();
        let shifted = address as u64 + (1 << 20);
        let region = RawMemoryRegion::from_raw(register(shifted), shifted, access, &domain);
        assert_eq!(region.unwrap().remote().address(), shifted);

        let raw = ffi::ibv_alloc_null_mr(pd);
        assert!(NullMemoryRegion::from_raw(raw, &foreign).is_err());
        assert!(NullMemoryRegion::from_raw(none, &domain).is_err());
        let region = NullMemoryRegion::from_raw(raw, &domain).unwrap();
        assert_eq!(region.gather_element(8).unwrap().as_raw().lkey, (*raw).lkey);
        region.close().unwrap();

        let local = (AccessFlags::LOCAL_WRITE | AccessFlags::ON_DEMAND).bits();
        let raw = ffi::ibv_reg_mr_iova2(pd, std::ptr::null_mut(), usize::MAX, 0, local);
        assert!(!raw.is_null());
        assert!(ImplicitMemoryRegion::from_raw(raw, &foreign).is_err());
        assert!(ImplicitMemoryRegion::from_raw(none, &domain).is_err());
        let region = ImplicitMemoryRegion::from_raw(raw, &domain).unwrap();
        assert_eq!(region.slice(&[1_u8]).lkey(), (*raw).lkey);
        region.close().unwrap();

        let mut wanted = ffi::ibv_alloc_dm_attr { length: 64, ..Default::default() };
        let raw = ffi::ibv_alloc_dm(context.as_raw(), &mut wanted);
        assert!(DeviceMemory::from_raw(raw, 64, &other).is_err());
        assert!(DeviceMemory::from_raw(std::ptr::null_mut(), 64, &context).is_err());
        let memory = DeviceMemory::from_raw(raw, 64, &context).unwrap();
        memory.write(0, &[7_u32; 16]).unwrap();
        assert_eq!((memory.len(), memory.as_raw()), (64, raw));
        memory.close().unwrap();

        let raw = ffi::ibv_alloc_td(context.as_raw(), &mut Default::default());
        assert!(ThreadDomain::from_raw(raw, &other).is_err());
        assert!(ThreadDomain::from_raw(std::ptr::null_mut(), &context).is_err());
        ThreadDomain::from_raw(raw, &context).unwrap().close().unwrap();

        let mask = ffi::ibv_xrcd_init_attr_mask::IBV_XRCD_INIT_ATTR_FD
            | ffi::ibv_xrcd_init_attr_mask::IBV_XRCD_INIT_ATTR_OFLAGS;
        let (fd, oflags) = (-1, libc::O_CREAT);
        let mut wanted = ffi::ibv_xrcd_init_attr { comp_mask: mask.0, fd, oflags };
        let raw = ffi::ibv_open_xrcd(context.as_raw(), &mut wanted);
        assert!(XrcDomain::from_raw(raw, &other).is_err());
        assert!(XrcDomain::from_raw(std::ptr::null_mut(), &context).is_err());
        XrcDomain::from_raw(raw, &context).unwrap().close().unwrap();
    }
    drop((domain, foreign));
    drop((context, other));
    device.assert_clean();
}

#[test]
fn the_ethernet_address_of_a_path_needs_the_feature() {
    let device = FunctionDevice::model();
    let context = device.context();
    let path = AddressVector::new(1, 0).global("::ffff:10.0.0.1".parse().unwrap(), 3);
    let result = path.resolve_ethernet(&context);
    let error = result.expect_err("the device is on no network");
    assert_eq!(error.verb(), "ibv_resolve_eth_l2_from_gid");
    if cfg!(not(any(feature = "neigh", feature = "system"))) {
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    }
}
