//! Refusals: by either side, or before a request is sent.

use std::thread;
use std::time::{Duration, Instant};

use ibverbs::rdmacm::{ConnectionError, Listener, RejectReason, Route};
use ibverbs::{Channel, ErrorKind, QueuePairType};

use crate::managed::{Device, TIME, accept, connect, here, listen, transfer};
use crate::nothing_is_left;
use crate::vm::alone;

fn reason(error: &ConnectionError) -> RejectReason {
    match error {
        ConnectionError::Rejected(rejection) => rejection.reason(),
        other => panic!("{other}"),
    }
}

#[test]
fn a_peer_can_be_rejected_with_a_word() {
    let _alone = alone("reject", 60);
    let (mut listener, address) = listen();
    thread::scope(|scope| {
        let one = scope.spawn(move || connect(address, b"").err().unwrap());
        listener.next_until(Instant::now() + TIME).unwrap().reject(b"full house").unwrap();
        let error = one.join().unwrap();
        assert_eq!(reason(&error), RejectReason::Refused);
        let ConnectionError::Rejected(rejection) = error else { panic!("{error}") };
        assert_eq!(rejection.private_data().trim_end(), b"full house");

        // A request that is dropped is rejected.
        let one = scope.spawn(move || connect(address, b"").err().unwrap());
        drop(listener.next_until(Instant::now() + TIME).unwrap());
        assert_eq!(reason(&one.join().unwrap()), RejectReason::Refused);

        // A request that was prepared and then dropped is rejected, too.
        let one = scope.spawn(move || connect(address, b"").err().unwrap());
        let device = Device::named("rxe0");
        let request = listener.next_until(Instant::now() + TIME).unwrap();
        drop(request.prepare(device.prepare()).map_err(|(.., error)| error).unwrap());
        assert_eq!(reason(&one.join().unwrap()), RejectReason::Refused);

        // A request that nobody has read is rejected when the listener is closed.
        let one = scope.spawn(move || connect(address, b"").err().unwrap());
        thread::sleep(Duration::from_millis(200));
        drop(listener);
        reason(&one.join().unwrap());
    });
    let nobody = connect(here(1), b"").err().unwrap();
    assert_eq!(reason(&nobody), RejectReason::NoListener);
    nothing_is_left();
}

#[test]
fn a_queue_pair_elsewhere_changes_nothing() {
    let _alone = alone("elsewhere", 60);
    let (mut listener, address) = listen();
    let (right, wrong) = (Device::named("rxe0"), Device::named("rxe1"));
    thread::scope(|scope| {
        let (right, wrong) = (&right, &wrong);
        let one = scope.spawn(move || {
            let route = Route::resolve(address, Instant::now() + TIME).unwrap();
            let (route, prepared, error) = route.prepare(wrong.prepare()).unwrap_err();
            assert_eq!(error, ConnectionError::WrongDevice);
            assert_eq!(error.kind(), ErrorKind::InvalidInput);
            drop(prepared);
            let datagram =
                ibverbs::CompletionQueue::builder(right.domain.context(), 4).build().unwrap();
            let kind = QueuePairType::UnreliableDatagram;
            let datagrams = right.domain.create_qp(&datagram, &datagram, kind).build().unwrap();
            let (route, datagrams, error) = route.prepare(datagrams).unwrap_err();
            assert!(error.to_string().contains("type RC"), "{error}");
            drop(datagrams);
            let uc = Channel::builder(&right.domain)
                .queue_pair_type(QueuePairType::UnreliableConnected)
                .build()
                .unwrap();
            let (route, _, error) = route.prepare(uc).unwrap_err();
            assert!(error.to_string().contains("type RC"), "{error}");
            route.connect(right.prepare(), b"", Instant::now() + TIME).unwrap()
        });
        let request = listener.next_until(Instant::now() + TIME).unwrap();
        let (request, _, error) = request.prepare(wrong.prepare()).unwrap_err();
        assert_eq!(error, ConnectionError::WrongDevice);
        let (request, prepared, error) = request.prepare_parts(wrong.prepare()).unwrap_err();
        assert_eq!(error, ConnectionError::WrongDevice);
        assert!(prepared.is_some());
        let two = request.accept(right.prepare(), b"", Instant::now() + TIME).unwrap();
        let one = one.join().unwrap();
        transfer(&mut (one, right.clone()), &mut (two, right.clone()), b"right");
    });
    drop((listener, right, wrong));
    nothing_is_left();
}

#[test]
fn private_data_that_are_too_long_are_refused_before_anything_is_sent() {
    let _alone = alone("private data", 60);
    let (mut listener, address) = listen();
    let error = connect(address, &[0; 57]).err().unwrap();
    assert!(error.to_string().contains("is 57, and must be within 0..=56"), "{error}");
    assert!(
        listener.next_until(Instant::now() + Duration::from_millis(200)).is_err(),
        "nothing was sent"
    );
    thread::scope(|scope| {
        let one = scope.spawn(move || connect(address, b"").err().unwrap());
        let error =
            accept(listener.next_until(Instant::now() + TIME).unwrap(), &[0; 197]).err().unwrap();
        assert!(error.to_string().contains("is 197"), "{error}");
        reason(&one.join().unwrap());
        let one = scope.spawn(move || connect(address, b"").err().unwrap());
        let error =
            listener.next_until(Instant::now() + TIME).unwrap().reject(&[0; 149]).unwrap_err();
        assert!(error.to_string().contains("is 149"), "{error}");
        reason(&one.join().unwrap());
    });
    drop(listener);
    nothing_is_left();
}

/// The requests for connections that have arrived at the first device, without those that it was answering already.
fn requests() -> u32 {
    let count = |of: &str| -> u32 {
        let file = format!("/sys/class/infiniband/rxe0/ports/1/{of}/req");
        std::fs::read_to_string(file).unwrap().trim().parse().unwrap()
    };
    count("cm_rx_msgs") - count("cm_rx_duplicates")
}

/// A request that exceeds the backlog is not answered, and the sender's kernel repeats it some seconds later.
#[test]
#[ignore = "Soft-RoCE: the kernel's counters of messages"]
fn a_full_backlog_makes_peers_wait() {
    let _alone = alone("backlog", 180);
    let mut listener = Listener::builder(here(0)).backlog(1).bind().unwrap();
    let address = listener.local_addr().unwrap();
    thread::scope(|scope| {
        let before = requests();
        let peers: Vec<_> =
            (0..2).map(|_| scope.spawn(move || connect(address, b"").unwrap())).collect();
        // The first request stays unread, so there is no room for the second, which comes a second time.
        let start = Instant::now();
        while requests().saturating_sub(before) < 3 {
            assert!(start.elapsed() < TIME, "{} requests, {before} before", requests());
            thread::sleep(Duration::from_millis(20));
        }
        let first = listener.next_until(Instant::now() + TIME).unwrap();
        let second = listener.next_until(Instant::now() + TIME).unwrap();
        let _accepted = [accept(first, b"").unwrap(), accept(second, b"").unwrap()];
        for peer in peers {
            peer.join().unwrap();
        }
    });
    drop(listener);
    nothing_is_left();
}

#[test]
fn deadlines_end_every_step_and_leave_nothing() {
    let _alone = alone("deadlines", 120);
    let short = Duration::from_millis(300);
    let within = |start: Instant| {
        let took = start.elapsed();
        assert!(took < TIME, "{took:?}");
    };
    // No machine has this address, so its hardware address cannot be resolved.
    let start = Instant::now();
    let error =
        Route::resolve("10.77.0.99:7471".parse().unwrap(), Instant::now() + short).unwrap_err();
    assert!(matches!(error, ConnectionError::TimedOut | ConnectionError::NoAddress(_)), "{error}");
    within(start);
    // No route leads to this network.
    let error =
        Route::resolve("203.0.113.1:7471".parse().unwrap(), Instant::now() + TIME).unwrap_err();
    // A device of software asks the machine, which may have one that leads to no device.
    let software = crate::vm::software().is_some() && error.kind() == ErrorKind::NotFound;
    assert!(software || error.kind() == ErrorKind::Unreachable, "{error}");

    // The peer's machine exists, but its program does not answer.
    let (mut listener, address) = listen();
    let device = Device::named("rxe0");
    let start = Instant::now();
    let route = Route::resolve(address, Instant::now() + TIME).unwrap();
    let error = route.connect(device.prepare(), b"", Instant::now() + short).err().unwrap();
    assert_eq!(error, ConnectionError::TimedOut);
    within(start);
    // The peer has read our request, and reads that we have gone.
    let request = listener.next_until(Instant::now() + TIME).unwrap();
    let start = Instant::now();
    assert!(
        request.accept(device.prepare(), b"", Instant::now() + Duration::from_millis(500)).is_err()
    );
    within(start);
    // No request comes.
    let start = Instant::now();
    let error = listener.next_until(Instant::now() + short).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut);
    assert!(start.elapsed() >= short);
    within(start);
    assert!(listener.try_next().unwrap().is_none());
    // Times longer than C can express count as no limit, and a deadline in the past ends at once.
    let none = Route::resolve(address, Instant::now()).unwrap_err();
    assert_eq!(none, ConnectionError::TimedOut);
    drop(Route::resolve(address, Instant::now() + Duration::from_secs(1 << 40)).unwrap());
    drop((listener, device));
    nothing_is_left();
}
