//! Asynchronous events, on the function device.

#[path = "support/figures.rs"]
mod figures;

use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use ibverbs::AsyncEventKind as Kind;
use ibverbs::AsyncEventSubject as Subject;
use ibverbs::{
    AsyncEvents, CompletionQueue, ErrorKind, ProtectionDomain, QueuePair, QueuePairState,
    QueuePairType, ReceiveWorkRequest, SharedReceiveQueue, WorkCompletion, ffi,
};
use ibverbs_function_device::FunctionDevice;

use figures::figure;

const SOON: Duration = Duration::from_millis(20);
const LATE: Duration = Duration::from_secs(60);

#[test]
fn every_kind_names_its_subject() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = CompletionQueue::builder(&context, 16).token(0xc0ffee).build().unwrap();
    let receives = domain.create_srq(4, 1).unwrap();
    receives.set_token(usize::MAX);
    assert_eq!(receives.token(), usize::MAX);
    let pair = domain.create_qp(&queue, &queue, QueuePairType::ReliableConnected).build().unwrap();
    let pair = pair.into_queue_pair();
    let events = context.async_events().unwrap();
    assert_eq!(events.next_event().unwrap(), None);

    use ffi::ibv_event_type as raw;
    let of_pairs = [
        (raw::IBV_EVENT_QP_FATAL, Kind::QueuePairFatal),
        (raw::IBV_EVENT_QP_REQ_ERR, Kind::QueuePairRequestError),
        (raw::IBV_EVENT_QP_ACCESS_ERR, Kind::QueuePairAccessError),
        (raw::IBV_EVENT_COMM_EST, Kind::CommunicationEstablished),
        (raw::IBV_EVENT_SQ_DRAINED, Kind::SendQueueDrained),
        (raw::IBV_EVENT_PATH_MIG, Kind::PathMigrated),
        (raw::IBV_EVENT_PATH_MIG_ERR, Kind::PathMigrationError),
        (raw::IBV_EVENT_QP_LAST_WQE_REACHED, Kind::LastRequestReached),
    ];
    for (event, kind) in of_pairs {
        // SAFETY: the queue pair is live.
        unsafe { device.raise_about(context.as_raw(), event, pair.as_raw()) };
        let event = events.next_event().unwrap().unwrap();
        assert_eq!((event.kind(), event.subject()), (kind, Subject::QueuePair(pair.number())));
    }
    for (event, kind) in [
        (raw::IBV_EVENT_SRQ_ERR, Kind::SharedReceiveQueueError),
        (raw::IBV_EVENT_SRQ_LIMIT_REACHED, Kind::SharedReceiveQueueLimit),
    ] {
        // SAFETY: the shared receive queue is live.
        unsafe { device.raise_about(context.as_raw(), event, receives.as_raw()) };
        let event = events.wait().unwrap();
        assert_eq!(event.kind(), kind);
        assert_eq!(event.subject(), Subject::SharedReceiveQueue(usize::MAX));
    }
    // SAFETY: the completion queue is live.
    unsafe { device.raise_about(context.as_raw(), raw::IBV_EVENT_CQ_ERR, queue.as_raw()) };
    let event = events.wait_timeout(LATE).unwrap();
    assert_eq!(event.kind(), Kind::CompletionQueueError);
    assert_eq!(event.subject(), Subject::CompletionQueue(0xc0ffee));
    for (event, kind) in [
        (raw::IBV_EVENT_PORT_ACTIVE, Kind::PortActive),
        (raw::IBV_EVENT_PORT_ERR, Kind::PortError),
        (raw::IBV_EVENT_LID_CHANGE, Kind::LidChange),
        (raw::IBV_EVENT_PKEY_CHANGE, Kind::PkeyChange),
        (raw::IBV_EVENT_SM_CHANGE, Kind::SubnetManagerChange),
        (raw::IBV_EVENT_CLIENT_REREGISTER, Kind::ClientReregister),
        (raw::IBV_EVENT_GID_CHANGE, Kind::GidChange),
    ] {
        device.raise(context.as_raw(), event, 3);
        let event = events.wait_deadline(Instant::now()).unwrap();
        assert_eq!((event.kind(), event.subject()), (kind, Subject::Port(3)));
    }
    device.raise(context.as_raw(), raw::IBV_EVENT_DEVICE_FATAL, 0);
    let event = events.wait().unwrap();
    assert_eq!((event.kind(), event.subject()), (Kind::DeviceFatal, Subject::Device));
    for odd in [20, 4711, u32::MAX] {
        device.raise(context.as_raw(), ffi::ibv_event_type(odd), 77);
        let event = events.wait().unwrap();
        assert_eq!((event.kind(), event.subject()), (Kind::Unknown(odd), Subject::Unknown(77)));
    }
    drop(events);
    drop((pair, receives));
    drop(queue);
    drop(domain);
    drop(context);
    device.assert_clean();
}

#[test]
fn waiting_has_an_end() {
    let device = FunctionDevice::model();
    let context = device.context();
    let events = AsyncEvents::new(&context).unwrap();
    let start = Instant::now();
    assert_eq!(events.wait_timeout(SOON).unwrap_err().kind(), ErrorKind::TimedOut);
    assert!(start.elapsed() >= SOON);
    assert_eq!(events.wait_deadline(start).unwrap_err().kind(), ErrorKind::TimedOut);
    let readable = |events: &AsyncEvents<'_>| {
        let mut file = libc::pollfd { fd: events.as_fd().as_raw_fd(), events: 1, revents: 0 };
        // SAFETY: there is one file.
        unsafe { libc::poll(&mut file, 1, 0) == 1 }
    };
    assert!(!readable(&events));
    thread::scope(|scope| {
        scope.spawn(|| {
            thread::sleep(SOON);
            device.raise(context.as_raw(), ffi::ibv_event_type::IBV_EVENT_PORT_ERR, 1);
        });
        assert_eq!(events.wait().unwrap().kind(), Kind::PortError);
    });
    device.raise(context.as_raw(), ffi::ibv_event_type::IBV_EVENT_PORT_ERR, 1);
    assert!(readable(&events));
}

#[test]
fn each_event_goes_to_one_thread() {
    const EVENTS: u32 = 2000;
    let device = FunctionDevice::model();
    let context = device.context();
    let (seen, count) = (AtomicU32::new(0), AtomicU32::new(0));
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let events = context.async_events().unwrap();
                loop {
                    match events.wait_timeout(Duration::from_millis(500)) {
                        Ok(event) => {
                            let Subject::Port(port) = event.subject() else { panic!("{event:?}") };
                            seen.fetch_add(port, Ordering::Relaxed);
                            count.fetch_add(1, Ordering::Relaxed);
                        }
                        Err(error) => break assert_eq!(error.kind(), ErrorKind::TimedOut),
                    }
                }
            });
        }
        for port in 1..=EVENTS {
            device.raise(context.as_raw(), ffi::ibv_event_type::IBV_EVENT_PORT_ACTIVE, port);
        }
    });
    assert_eq!(count.into_inner(), EVENTS);
    assert_eq!(seen.into_inner(), EVENTS * (EVENTS + 1) / 2);
}

#[test]
fn objects_go_at_once_whatever_became_of_their_events() {
    let device = FunctionDevice::model();
    let context = Arc::new(device.context());
    let domain = Arc::new(ProtectionDomain::new(&context).unwrap());
    let queue = Arc::new(CompletionQueue::new(&context, 16).unwrap());
    let receives = SharedReceiveQueue::new(&domain, 4, 1).unwrap();
    let reliable = QueuePairType::ReliableConnected;
    let pair = QueuePair::builder(&domain, &queue, &queue, reliable).build().unwrap();
    let pair = pair.into_queue_pair();
    let events = context.async_events().unwrap();
    // SAFETY: all three are live.
    unsafe {
        for _ in 0..2 {
            let fatal = ffi::ibv_event_type::IBV_EVENT_QP_FATAL;
            device.raise_about(context.as_raw(), fatal, pair.as_raw());
            let error = ffi::ibv_event_type::IBV_EVENT_SRQ_ERR;
            device.raise_about(context.as_raw(), error, receives.as_raw());
            let error = ffi::ibv_event_type::IBV_EVENT_CQ_ERR;
            device.raise_about(context.as_raw(), error, queue.as_raw());
        }
    }
    // Half of the events are read but not acted upon; the others stay unread in the file.
    for _ in 0..3 {
        events.wait().unwrap();
    }
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || {
        drop((pair, receives, queue));
        sender.send(()).unwrap();
    });
    receiver.recv_timeout(LATE).expect("destroying hangs, or panicked");
    assert_eq!(events.next_event().unwrap(), None, "nothing tells of what is gone");
    drop(events);
    drop((domain, context));
    device.assert_clean();
}

/// A queue that is too small for what is posted loses completions. The queue and every queue pair that
/// completes there raise an event.
#[test]
fn a_queue_that_overruns_is_told_with_its_queue_pairs() {
    const ROOM: u32 = 3;
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let events = context.async_events().unwrap();
    let queue = CompletionQueue::builder(&context, ROOM).token(9).build().unwrap();
    let builder = domain.create_qp(&queue, &queue, QueuePairType::ReliableConnected);
    let prepared = builder.max_send_wr(16).max_recv_wr(16).max_inline_data(8).build().unwrap();
    let itself = prepared.endpoint();
    let mut pair = prepared.handshake(itself).unwrap();
    for wr_id in 0..8 {
        // SAFETY: the first has no memory, the second is copied.
        unsafe {
            pair.post(&mut ReceiveWorkRequest::new(&mut []).unwrap(), 100 + wr_id).unwrap();
            pair.post_inline(&[], wr_id).unwrap();
        }
    }
    device.run();
    let seen = [events.wait_timeout(LATE).unwrap(), events.wait_timeout(LATE).unwrap()];
    let seen = seen.map(|event| (event.kind(), event.subject()));
    let expected = [
        (Kind::CompletionQueueError, Subject::CompletionQueue(9)),
        (Kind::QueuePairFatal, Subject::QueuePair(pair.number())),
    ];
    assert_eq!(seen, expected);
    assert_eq!(events.next_event().unwrap(), None, "it is told once");
    let mut slots = [WorkCompletion::default(); 16];
    assert_eq!(queue.poll(&mut slots).unwrap().len(), ROOM as usize);
    assert!(queue.poll(&mut slots).unwrap().is_empty());
    assert_eq!(pair.state().unwrap(), QueuePairState::Error);
    // The documentation of the event says that both have to be destroyed.
    drop(events);
    pair.close().unwrap();
    queue.close().unwrap();
    drop(domain);
    drop(context);
    device.assert_clean();
    figure(
        "cq-overrun",
        "as hardware has it: CompletionQueueError with the queue's token, then QueuePairFatal with the \
         queue pair's number, each once; what had room is found, the queue pair is in ERR, and both \
         close",
    );
}

#[test]
fn a_context_without_a_file_is_an_error() {
    let device = FunctionDevice::model();
    let context = device.context();
    // SAFETY: the context is live; its file is put back before it is closed.
    unsafe {
        let fd = std::mem::replace(&mut (*context.as_raw()).async_fd, -1);
        let error = context.async_events().unwrap_err();
        assert_eq!(error.raw_os_error(), libc::EBADF);
        (*context.as_raw()).async_fd = fd;
    }
}
