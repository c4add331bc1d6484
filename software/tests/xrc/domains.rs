//! XRC domains: private ones, those of files, and queue pairs that are opened by their number.

use std::fs::File;
use std::os::fd::AsFd;
use std::ptr::null_mut;
use std::sync::Arc;

use ibverbs::device::{AsyncEventKind, AsyncEventSubject, AsyncEvents, DeviceCapabilities};
use ibverbs::domain::{XrcDomain, XrcDomainScope};
use ibverbs::queue_pair::{OpenedQueuePair, StateTransition};
use ibverbs::{ErrorKind, QueuePair, QueuePairState, QueuePairType, Rc, SharedReceiveQueue, ffi};
use ibverbs_software::{Device, Verb, When};

use super::{Side, connect, post, send, succeeded, world};

/// A file without a name.
fn file() -> File {
    // SAFETY: the descriptor is ours.
    unsafe {
        let fd = libc::memfd_create(c"xrc".as_ptr(), libc::MFD_CLOEXEC);
        std::os::fd::FromRawFd::from_raw_fd(fd)
    }
}

#[test]
fn the_device_says_that_it_has_them() {
    let context = Device::new().unwrap().open().unwrap();
    let device = context.query_device().unwrap();
    assert!(device.capabilities().contains(DeviceCapabilities::XRC));
    assert_eq!(device.max_srq(), 65_000);
    let context = Device::builder().max_srq(1 << 20).build().unwrap().open().unwrap();
    assert_eq!(context.query_device().unwrap().max_srq(), 65_000, "numbers have 24 bits");
}

#[test]
fn a_file_has_one_domain_while_a_handle_of_it_is_open() {
    let device = Device::new().unwrap();
    let (context, second) = (device.open().unwrap(), device.open().unwrap());
    let (one, other) = (file(), file());
    let scope = XrcDomainScope::ExistingFile(one.as_fd());
    assert_eq!(XrcDomain::open(&context, scope).unwrap_err().raw_os_error(), Some(libc::EAGAIN));
    let first = XrcDomain::open(&context, XrcDomainScope::NewFile(one.as_fd())).unwrap();
    for context in [&context, &second] {
        let scope = XrcDomainScope::NewFile(one.as_fd());
        assert_eq!(XrcDomain::open(context, scope).unwrap_err().raw_os_error(), Some(libc::EINVAL));
        XrcDomain::open(context, XrcDomainScope::ExistingFile(one.as_fd())).unwrap();
        let copy = one.try_clone().unwrap();
        XrcDomain::open(context, XrcDomainScope::File(copy.as_fd())).unwrap().close().unwrap();
        let scope = XrcDomainScope::ExistingFile(other.as_fd());
        assert_eq!(XrcDomain::open(context, scope).unwrap_err().raw_os_error(), Some(libc::EAGAIN));
    }
    first.close().unwrap();
    let scope = XrcDomainScope::ExistingFile(one.as_fd());
    assert_eq!(XrcDomain::open(&second, scope).unwrap_err().raw_os_error(), Some(libc::EAGAIN));
    XrcDomain::open(&second, XrcDomainScope::NewFile(one.as_fd())).unwrap();

    // Another device has another domain for the same file.
    let stranger = Device::new().unwrap().open().unwrap();
    let _domain = XrcDomain::open(&context, XrcDomainScope::File(one.as_fd())).unwrap();
    let scope = XrcDomainScope::ExistingFile(one.as_fd());
    assert_eq!(XrcDomain::open(&stranger, scope).unwrap_err().raw_os_error(), Some(libc::EAGAIN));
}

#[test]
fn wrong_arguments_are_refused() {
    let device = Device::new().unwrap();
    let context = device.open().unwrap();
    let open = |comp_mask, fd, oflags| {
        let mut attributes = ffi::ibv_xrcd_init_attr { comp_mask, fd, oflags };
        // SAFETY: the context is live, and the attributes are writable.
        let raw = unsafe { ffi::ibv_open_xrcd(context.as_raw(), &mut attributes) };
        assert!(raw.is_null());
        std::io::Error::last_os_error().raw_os_error().unwrap()
    };
    // No file of another thread gets such a number.
    assert_eq!(open(3, i32::MAX, libc::O_CREAT), libc::EBADF);
    assert_eq!(open(3, -2, libc::O_CREAT), libc::EBADF);
    assert_eq!(open(1, -1, libc::O_CREAT), libc::EINVAL);
    assert_eq!(open(7, -1, libc::O_CREAT), libc::EOPNOTSUPP);
    device.fail(Verb::OpenXrcd, libc::ENOMEM, When::After, 1);
    let error = XrcDomain::open(&context, XrcDomainScope::Private).unwrap_err();
    assert_eq!((error.verb(), error.raw_os_error()), ("ibv_open_xrcd", Some(libc::ENOMEM)));
}

#[test]
fn a_domain_in_use_is_not_closed() {
    let side = Side::of(Device::new().unwrap());
    let close = || {
        // SAFETY: the domain is live; if it were closed, this would fail the test.
        unsafe { ffi::ibv_close_xrcd(side.xrc.as_raw()) }
    };
    let queue = side.shared_queue();
    assert_eq!(close(), libc::EBUSY);
    // SAFETY: the queue is live, as the test shows.
    let destroyed = unsafe { ffi::ibv_destroy_cq(side.received.as_raw()) };
    assert_eq!(destroyed, libc::EBUSY, "the shared receive queue uses it");
    queue.close().unwrap();
    let queue_pair = side.receiving().build().unwrap();
    assert_eq!(close(), libc::EBUSY);
    let opened = OpenedQueuePair::open(&side.xrc, queue_pair.endpoint().num()).unwrap();
    queue_pair.close().unwrap();
    assert_eq!(close(), libc::EBUSY);
    opened.close().unwrap();
    let Side { xrc, .. } = side;
    Arc::into_inner(xrc).unwrap().close().unwrap();
}

#[test]
fn contexts_of_one_device_share_the_domain_of_a_file() {
    let (network, [one, other]) = world(1, 0.0);
    let file = file();
    let scope = XrcDomainScope::File(file.as_fd());
    // The queue pair is of one context, the shared receive queue of another.
    let second = Side {
        context: Arc::new(other.device.open().unwrap()),
        device: network.device().unwrap(),
        ..Side::new(&network)
    };
    let Side { context, .. } = &second;
    let own = |context| Arc::new(XrcDomain::open(context, scope).unwrap());
    let (xrc, its) = (own(&other.context), own(context));
    let domain = Arc::new(ibverbs::ProtectionDomain::new(context).unwrap());
    let received = Arc::new(ibverbs::CompletionQueue::new(context, 16).unwrap());
    let queue = SharedReceiveQueue::extended(&domain, &its, &received, 4, 1).unwrap();
    let sending = one.sending().build().unwrap();
    let receiving = other.receiving().xrc_domain(&xrc).build().unwrap();
    let endpoints = (sending.endpoint(), receiving.endpoint());
    let mut sending = sending.handshake(endpoints.1).unwrap();
    let receiving = receiving.handshake(endpoints.0).unwrap();

    let here = one.memory();
    let there = ibverbs::SharedMemoryRegion::<u64>::new(&domain, 8, super::REMOTE).unwrap();
    here.write_one(0, 77).unwrap();
    post(&queue, &there, 0..1, 1).unwrap();
    send(&mut sending, &here, 0..1, queue.number().unwrap(), 2).unwrap();
    assert!(network.run_until_idle(super::LONG));
    assert_eq!(succeeded(&one.sent), [2]);
    assert_eq!(succeeded(&received), [1]);
    assert_eq!(there.read_one(0).unwrap(), 77);

    // The second context keeps the queue pair after its creator has closed it.
    let events = AsyncEvents::new(&**context).unwrap();
    let mut opened = OpenedQueuePair::open(&its, receiving.number()).unwrap();
    assert_eq!(opened.number(), receiving.number());
    assert_eq!(opened.state().unwrap(), QueuePairState::ReadyToSend);
    receiving.close().unwrap();
    post(&queue, &there, 1..2, 3).unwrap();
    send(&mut sending, &here, 0..1, queue.number().unwrap(), 4).unwrap();
    assert!(network.run_until_idle(super::LONG));
    assert_eq!((succeeded(&one.sent), succeeded(&received)), (vec![4], vec![3]));

    // Events come to those that have it open.
    send(&mut sending, &here, 0..1, 0xff_ffff, 5).unwrap();
    assert!(network.run_until_idle(super::LONG));
    let event = events.next_event().unwrap().unwrap();
    assert_eq!(event.kind(), AsyncEventKind::QueuePairAccessError);
    assert_eq!(event.subject(), AsyncEventSubject::QueuePair(opened.number()));
    assert!(AsyncEvents::new(&*other.context).unwrap().next_event().unwrap().is_none());
    assert_eq!(opened.state().unwrap(), QueuePairState::Error);
    opened.modify(StateTransition::to(QueuePairState::Reset)).unwrap();
    let number = opened.number();
    opened.close().unwrap();
    let error = OpenedQueuePair::open(&its, number).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput, "it is gone with its last owner");
}

#[test]
fn only_receiving_queue_pairs_of_the_domain_are_opened() {
    let side = Side::of(Device::new().unwrap());
    let receiving = side.receiving().build().unwrap();
    let sending = side.sending().build().unwrap();
    let stranger = XrcDomain::open(&side.context, XrcDomainScope::Private).unwrap();
    let number = receiving.endpoint().num();
    for (domain, number) in
        [(&stranger, number), (&*side.xrc, sending.endpoint().num()), (&*side.xrc, 0xff_ffff)]
    {
        let error = OpenedQueuePair::open(domain, number).unwrap_err();
        assert_eq!((error.verb(), error.kind()), ("ibv_open_qp", ErrorKind::InvalidInput));
    }
    side.device.fail(Verb::OpenQp, libc::ENOMEM, When::Before, 1);
    assert!(OpenedQueuePair::open(&side.xrc, number).is_err());
    OpenedQueuePair::open(&side.xrc, number).unwrap();
    // Its own owner still has it.
    OpenedQueuePair::open(&side.xrc, number).unwrap().close().unwrap();
    receiving.close().unwrap();
}

#[test]
fn each_half_has_only_the_queues_of_its_direction() {
    let (_network, [one, other]) = world(2, 0.0);
    let (sending, receiving) = connect(&one, &other);
    let (mut sending, mut receiving) = (sending, receiving.erase());
    let plain = SharedReceiveQueue::new(&one.domain, 4, 1).unwrap();
    assert_eq!(plain.number().unwrap_err().kind(), ErrorKind::Unsupported);
    let extended = other.shared_queue();
    let builder = QueuePair::builder(&other.domain, &other.sent, &other.received, Rc);
    let error = builder.srq(&extended).build().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput, "it is for XRC alone");
    let sending_at_run_time =
        QueuePair::builder(&one.domain, &one.sent, &one.sent, QueuePairType::XrcSend);
    assert!(sending_at_run_time.srq(&plain).build().is_err());
    let one_more = one.sending().build().unwrap().into_queue_pair().erase();
    let other_more = one.receiving().build().unwrap().into_queue_pair().erase();
    for (queue_pair, sends, receives) in [(one_more, 64, 0), (other_more, 0, 0)] {
        let capacities = queue_pair.query().unwrap();
        let cap = capacities.as_raw().cap;
        assert_eq!((cap.max_send_wr, cap.max_recv_wr), (sends, receives));
    }

    // Posting to the direction that is not there fails, and leaves the queue pair as it is.
    let memory = one.memory();
    assert!(send(&mut receiving, &memory, 0..1, 1, 1).is_err());
    // A number has 24 bits.
    let error = send(&mut sending, &memory, 0..1, 1 << 24, 1).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EINVAL));
    let mut bad = null_mut();
    let mut receive = ffi::ibv_recv_wr::default();
    for queue_pair in [&sending.erase(), &receiving] {
        // SAFETY: the queue pair is live, the request has no elements, and nothing is queued.
        let returned = unsafe { ffi::ibv_post_recv(queue_pair.as_raw(), &mut receive, &mut bad) };
        assert_eq!((returned, bad), (libc::EINVAL, &raw mut receive));
        assert_eq!(queue_pair.state().unwrap(), QueuePairState::ReadyToSend);
    }
}
