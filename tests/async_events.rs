//! Asynchronous events, on a device of software.

#[path = "support/figures.rs"]
mod figures;
#[path = "support/software.rs"]
mod software;

use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use ibverbs::device::AsyncEventKind as Kind;
use ibverbs::device::AsyncEventSubject as Subject;
use ibverbs::device::AsyncEvents;
use ibverbs::{
    CompletionQueue, ErrorKind, Inline, ProtectionDomain, QueuePair, QueuePairState, QueuePairType,
    Rc, ReceiveWorkRequest, SendWorkRequest, SharedReceiveQueue, WorkCompletion,
};
use ibverbs_software::EventSubject;

use figures::figure;
use software::Software;

const SOON: Duration = Duration::from_millis(20);
const LATE: Duration = Duration::from_secs(60);

#[test]
fn every_kind_names_its_subject() {
    let device = Software::new();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = CompletionQueue::builder(&context, 16).token(0xc0ffee).build().unwrap();
    let receives = domain.create_srq(4, 1).unwrap();
    receives.set_token(usize::MAX);
    assert_eq!(receives.token(), usize::MAX);
    let pair = domain.create_qp(&queue, &queue, Rc).build().unwrap();
    let pair = pair.into_queue_pair();
    let events = context.async_events().unwrap();
    assert_eq!(events.next_event().unwrap(), None);

    for kind in [
        Kind::QueuePairFatal,
        Kind::QueuePairRequestError,
        Kind::QueuePairAccessError,
        Kind::CommunicationEstablished,
        Kind::SendQueueDrained,
        Kind::PathMigrated,
        Kind::PathMigrationError,
        Kind::LastRequestReached,
    ] {
        device.make_up_event(kind, EventSubject::QueuePair(pair.number())).unwrap();
        let event = events.next_event().unwrap().unwrap();
        assert_eq!((event.kind(), event.subject()), (kind, Subject::QueuePair(pair.number())));
    }
    for kind in [Kind::SharedReceiveQueueError, Kind::SharedReceiveQueueLimit] {
        let about = EventSubject::SharedReceiveQueue(receives.as_raw());
        device.make_up_event(kind, about).unwrap();
        let event = events.wait().unwrap();
        assert_eq!(event.kind(), kind);
        assert_eq!(event.subject(), Subject::SharedReceiveQueue(usize::MAX));
    }
    let about = EventSubject::CompletionQueue(queue.as_raw());
    device.make_up_event(Kind::CompletionQueueError, about).unwrap();
    let event = events.wait_until(Instant::now() + LATE).unwrap();
    assert_eq!(event.kind(), Kind::CompletionQueueError);
    assert_eq!(event.subject(), Subject::CompletionQueue(0xc0ffee));
    for kind in [
        Kind::PortActive,
        Kind::PortError,
        Kind::LidChange,
        Kind::PkeyChange,
        Kind::SubnetManagerChange,
        Kind::ClientReregister,
        Kind::GidChange,
    ] {
        device.make_up_event(kind, EventSubject::Port(3)).unwrap();
        let event = events.wait_until(Instant::now()).unwrap();
        assert_eq!((event.kind(), event.subject()), (kind, Subject::Port(3)));
    }
    device.make_up_event(Kind::DeviceSpeedChange, EventSubject::Device).unwrap();
    let event = events.wait().unwrap();
    assert_eq!((event.kind(), event.subject()), (Kind::DeviceSpeedChange, Subject::Device));
    device.make_up_event(Kind::DeviceFatal, EventSubject::Device).unwrap();
    let event = events.wait().unwrap();
    assert_eq!((event.kind(), event.subject()), (Kind::DeviceFatal, Subject::Device));
    for odd in [21, 4711, u32::MAX] {
        device.make_up_event(Kind::Unknown(odd), EventSubject::Other(77)).unwrap();
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
    let device = Software::new();
    let context = device.context();
    let events = AsyncEvents::new(&context).unwrap();
    let start = Instant::now();
    assert_eq!(events.wait_until(Instant::now() + SOON).unwrap_err().kind(), ErrorKind::TimedOut);
    assert!(start.elapsed() >= SOON);
    assert_eq!(events.wait_until(start).unwrap_err().kind(), ErrorKind::TimedOut);
    let readable = |events: &AsyncEvents<'_>| {
        let mut file = libc::pollfd { fd: events.as_fd().as_raw_fd(), events: 1, revents: 0 };
        // SAFETY: there is one file.
        unsafe { libc::poll(&mut file, 1, 0) == 1 }
    };
    assert!(!readable(&events));
    thread::scope(|scope| {
        scope.spawn(|| {
            thread::sleep(SOON);
            device.make_up_event(Kind::PortError, EventSubject::Port(1)).unwrap();
        });
        assert_eq!(events.wait().unwrap().kind(), Kind::PortError);
    });
    device.make_up_event(Kind::PortError, EventSubject::Port(1)).unwrap();
    assert!(readable(&events));
}

#[test]
fn each_event_goes_to_one_thread() {
    const EVENTS: u32 = 2000;
    let device = Software::new();
    let context = device.context();
    let (seen, count, start) = (AtomicU32::new(0), AtomicU32::new(0), Instant::now());
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let events = context.async_events().unwrap();
                loop {
                    match events.wait_until(Instant::now() + SOON) {
                        Ok(event) => {
                            let Subject::Port(port) = event.subject() else { panic!("{event:?}") };
                            seen.fetch_add(port, Ordering::Relaxed);
                            count.fetch_add(1, Ordering::Relaxed);
                        }
                        Err(error) => assert_eq!(error.kind(), ErrorKind::TimedOut),
                    }
                    if count.load(Ordering::Relaxed) >= EVENTS {
                        break;
                    }
                    assert!(start.elapsed() < LATE, "{count:?} events");
                }
            });
        }
        for port in 1..=EVENTS {
            device.make_up_event(Kind::PortActive, EventSubject::Port(port)).unwrap();
        }
    });
    assert_eq!(context.async_events().unwrap().next_event().unwrap(), None);
    assert_eq!(count.into_inner(), EVENTS);
    assert_eq!(seen.into_inner(), EVENTS * (EVENTS + 1) / 2);
}

#[test]
fn objects_go_at_once_whatever_became_of_their_events() {
    let device = Software::new();
    let context = Arc::new(device.context());
    let domain = Arc::new(ProtectionDomain::new(&context).unwrap());
    let queue = Arc::new(CompletionQueue::new(&context, 16).unwrap());
    let receives = SharedReceiveQueue::new(&domain, 4, 1).unwrap();
    let reliable = QueuePairType::ReliableConnected;
    let pair = QueuePair::builder(&domain, &queue, &queue, reliable).build().unwrap();
    let pair = pair.into_queue_pair();
    let events = context.async_events().unwrap();
    let about = [
        (Kind::QueuePairFatal, EventSubject::QueuePair(pair.number())),
        (Kind::SharedReceiveQueueError, EventSubject::SharedReceiveQueue(receives.as_raw())),
        (Kind::CompletionQueueError, EventSubject::CompletionQueue(queue.as_raw())),
    ];
    for (kind, subject) in about.into_iter().chain(about) {
        device.make_up_event(kind, subject).unwrap();
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
    let device = Software::new();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let events = context.async_events().unwrap();
    let queue = CompletionQueue::builder(&context, ROOM).token(9).build().unwrap();
    let builder = domain.create_qp(&queue, &queue, Rc);
    let prepared = builder.max_send_wr(16).max_recv_wr(16).max_inline_data(8).build().unwrap();
    let itself = prepared.endpoint();
    let mut pair = prepared.handshake(itself).unwrap();
    for wr_id in 0..8 {
        // SAFETY: the first has no memory, the second is copied.
        unsafe {
            pair.post(ReceiveWorkRequest::new(()), 100 + wr_id).unwrap();
            pair.post(SendWorkRequest::new(Inline(&[])), wr_id).unwrap();
        }
    }
    device.run();
    let seen = [
        events.wait_until(Instant::now() + LATE).unwrap(),
        events.wait_until(Instant::now() + LATE).unwrap(),
    ];
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
    let device = Software::new();
    let context = device.context();
    // SAFETY: the context is live; its file is put back before it is closed.
    unsafe {
        let fd = std::mem::replace(&mut (*context.as_raw()).async_fd, -1);
        let error = context.async_events().unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EBADF));
        (*context.as_raw()).async_fd = fd;
    }
}
