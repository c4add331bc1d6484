//! iWARP: connections, channels and queue pairs on Soft-iWARP. To be run by `script/test siw`, in the
//! machine that `script/vm --siw` starts.
//!
//! On iWARP a message that finds no receive ends the connection, so the tests post each receive before the peer
//! may send. The target of an RDMA read must allow remote writes.

#[path = "support/connections/asynchronous.rs"]
mod asynchronous;
#[path = "support/connections/credits.rs"]
mod credits;
#[path = "support/connections/deaths.rs"]
mod deaths;
#[path = "support/managed.rs"]
mod managed;
#[path = "support/connections/random.rs"]
mod random;
#[path = "support/vm/mod.rs"]
mod vm;

use std::thread;
use std::time::{Duration, Instant};

use ibverbs::rdmacm::{ConnectionError, ConnectionEventKind as Kind, Route};
use ibverbs::{AccessFlags, Channel, ErrorKind, Inline, Rc, TransportError, WorkCompletion, ffi};

use managed::{Device, TIME, accept, connect, expect, listen, nothing_is_left, pair, transfer};
use vm::{alone, completions, success};

#[test]
fn a_handshake_says_what_is_needed() {
    let _alone = alone("handshake", 60);
    let device = Device::first();
    let prepared = device.prepare();
    let remote = prepared.endpoint();
    let error = prepared.handshake(remote).unwrap_err().error;
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    assert!(error.to_string().contains("connection manager"), "{error}");
    drop(device);
    nothing_is_left();
}

#[test]
fn channels_send_both_ways_and_hear_of_the_end() {
    let _alone = alone("channels", 120);
    for ends in 0..2 {
        let [mut one, mut two] = pair();
        assert_eq!(one.0.private_data()[..], *b"from two", "not padded");
        for round in 0..10 {
            // The side that has connected sends first.
            transfer(&mut one, &mut two, format!("one to two, {round}").as_bytes());
            transfer(&mut two, &mut one, format!("two to one, {round}").as_bytes());
        }
        let (first, second) = if ends == 0 { (&mut one, &mut two) } else { (&mut two, &mut one) };
        first.0.disconnect().unwrap();
        expect(&mut second.0, Kind::Disconnected);
        second.0.disconnect().unwrap();
        assert!(matches!(second.0.send(Inline(b"x")), Err(TransportError::Stopped)));
        drop((one, two));
        nothing_is_left();
    }
}

/// Soft-iWARP completes nothing that is posted after the end of a connection.
#[test]
fn an_idle_side_notices_the_end_by_its_signs_of_life() {
    let _alone = alone("signs of life", 120);
    let [mut one, two] = pair();
    one.0.keep_alive().unwrap();
    drop(two);
    expect(&mut one.0, Kind::Disconnected);
    let start = Instant::now();
    while one.0.keep_alive().is_ok() {
        assert!(start.elapsed() < TIME, "it is not noticed");
        thread::sleep(Duration::from_millis(100));
    }
    drop(one);
    nothing_is_left();
}

#[test]
fn a_receive_can_be_there_before_the_peer_is_accepted() {
    let _alone = alone("receive first", 60);
    let (mut listener, address) = listen();
    thread::scope(|scope| {
        scope.spawn(move || {
            let (mut one, _device) = connect(address, &[1; 200]).unwrap();
            one.until(Instant::now() + TIME).send(Inline(b"at once")).unwrap();
            expect(&mut one, Kind::Disconnected);
        });
        let request = listener.next_until(Instant::now() + TIME).unwrap();
        assert!(request.is_iwarp());
        assert_eq!(request.private_data()[..], [1; 200]);
        let device = Device::of(request.open_device().unwrap(), request.port());
        let mut region = device.domain.allocate::<u8>(64).unwrap();
        let room = region.slice_mut(..).unwrap();
        let (mut channel, accept) =
            request.prepare_parts(device.prepare()).map_err(|(.., error)| error).unwrap();
        let mut control = None;
        channel
            .scope(|scope| {
                let receive = scope.post_receive(room)?;
                control = Some(accept.accept(b"", Instant::now() + TIME).unwrap());
                let (received, told) = receive.wait_until(Instant::now() + TIME)?;
                assert_eq!(&received[..told.byte_len() as usize], b"at once");
                Ok::<_, TransportError>(())
            })
            .unwrap();
        control.unwrap().disconnect().unwrap();
    });
    drop(listener);
    nothing_is_left();
}

/// Reads and writes of the peer's memory.
#[test]
fn memory_of_the_peer() {
    let _alone = alone("memory", 60);
    let [mut one, two] = pair();
    let access = AccessFlags::REMOTE_READ | AccessFlags::REMOTE_WRITE;
    let theirs = two.1.domain.allocate_shared::<u8>(64, access).unwrap();
    theirs.write(0, b"read me").unwrap();
    // A read is a write of the peer, into memory that peers may write.
    let sink = one.1.domain.allocate_shared::<u8>(64, access).unwrap();
    let remote = theirs.remote_range(..7).unwrap();
    let deadline = Instant::now() + TIME;
    one.0.until(deadline).read(&mut sink.slice(..7).unwrap(), remote).unwrap();
    assert_eq!(sink.slice(..7).unwrap().to_vec(), b"read me");
    sink.write(0, b"written").unwrap();
    one.0.until(deadline).write(sink.slice(..7).unwrap(), remote).unwrap();
    let start = Instant::now();
    while theirs.slice(..7).unwrap().to_vec() != b"written" {
        assert!(start.elapsed() < TIME, "a write arrives");
    }
    // Memory that peers may never write is refused before anything is sent, by every way to post.
    let mut region = one.1.domain.allocate::<u8>(7).unwrap();
    let refused = |error: TransportError| {
        let TransportError::Verbs(error) = error else { panic!("{error}") };
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
        assert!(error.to_string().contains("REMOTE_WRITE"), "{error}");
    };
    let mut room = region.slice_mut(..).unwrap();
    refused(one.0.until(deadline).read(&mut room, remote).unwrap_err());
    refused(one.0.read(&mut [room.reborrow()], remote).unwrap_err());
    refused(one.0.read(&mut vec![room.reborrow()], remote).unwrap_err());
    let mixed = &mut (sink.slice(..3).unwrap(), room.reborrow().slice(..4).unwrap());
    refused(one.0.read(mixed, remote).unwrap_err());
    one.0
        .scope(|scope| {
            refused(scope.post_read(room, remote).map(drop).unwrap_err());
            Ok::<_, TransportError>(())
        })
        .unwrap();
    // The channel is as before.
    one.0.until(deadline).read(&mut sink.slice(..7).unwrap(), remote).unwrap();
    assert_eq!(sink.slice(..7).unwrap().to_vec(), b"written");
    drop((theirs, sink, region));
    drop((one, two));
    nothing_is_left();
}

#[test]
fn queue_pairs() {
    let _alone = alone("queue pairs", 60);
    let (mut listener, address) = listen();
    {
        let context = ibverbs::open("siw0").unwrap();
        let domain = context.alloc_pd().unwrap();
        let queue = context.create_cq(16).unwrap();
        let prepare = || domain.create_qp(&queue, &queue, Rc).max_recv_wr(4).build().unwrap();
        let mut region = domain.allocate::<u8>(64).unwrap();
        let (prepared, other) = (prepare(), prepare());
        let (mut one, two) = thread::scope(|scope| {
            let one = scope.spawn(move || {
                Route::resolve(address, Instant::now() + TIME)
                    .unwrap()
                    .connect(prepared, b"", Instant::now() + TIME)
                    .unwrap()
            });
            let request = listener.next_until(Instant::now() + TIME).unwrap();
            let mut pending = request.prepare(other).map_err(|(.., error)| error).unwrap();
            // SAFETY: the region is looked at when the completion was polled, and outlives both.
            unsafe { pending.queue_pair().post_receive(&mut region, 32..48, 2) }.unwrap();
            let two = pending.start(b"").unwrap().finish(Instant::now() + TIME).unwrap();
            (one.join().unwrap(), two)
        });
        region[..4].copy_from_slice(b"verb");
        // SAFETY: the region is not touched until both completions were polled.
        unsafe { one.post_send(&region, ..4, 1) }.unwrap();
        let both = completions(&queue, 2);
        success(&both, 1);
        assert_eq!(success(&both, 2).byte_len(), 4);
        assert_eq!(&region[32..36], b"verb");
        drop((one, two));
    }
    drop(listener);
    nothing_is_left();
}

#[test]
fn refusals_and_deadlines() {
    let _alone = alone("refusals", 120);
    let (mut listener, address) = listen();
    thread::scope(|scope| {
        let one = scope.spawn(move || connect(address, b"").err().unwrap());
        listener.next_until(Instant::now() + TIME).unwrap().reject(b"full house").unwrap();
        let error = one.join().unwrap();
        let ConnectionError::Rejected(rejection) = error else { panic!("{error}") };
        assert_eq!(rejection.private_data().trim_end(), b"full house");
        let one = scope.spawn(move || connect(address, b"").err().unwrap());
        drop(listener.next_until(Instant::now() + TIME).unwrap());
        assert!(matches!(one.join().unwrap(), ConnectionError::Rejected(_)));
        let error = connect(address, &[0; 253]).err().unwrap();
        assert!(error.to_string().contains("is 253"), "{error}");

        // The peer does not answer before the deadline.
        let device = Device::first();
        let route = Route::resolve(address, Instant::now() + TIME).unwrap();
        let start = Instant::now();
        let error = route
            .connect(device.prepare(), b"", Instant::now() + Duration::from_millis(300))
            .err()
            .unwrap();
        assert_eq!(error, ConnectionError::TimedOut);
        assert!(start.elapsed() < Duration::from_secs(20));
        let late = accept(listener.next_until(Instant::now() + TIME).unwrap(), b"");
        assert!(late.is_err(), "the peer has given up");
    });
    drop(listener);
    let error = connect(address, b"").err().unwrap();
    assert!(matches!(error, ConnectionError::Rejected(_)), "nobody listens: {error}");
    nothing_is_left();
}

#[test]
fn a_hundred_connections_leave_nothing() {
    let _alone = alone("a hundred connections", 300);
    let (mut listener, address) = listen();
    let device = Device::first();
    for round in 0..100 {
        let [one, two] = thread::scope(|scope| {
            let prepared = device.prepare();
            let one = scope.spawn(move || {
                Route::resolve(address, Instant::now() + TIME)
                    .unwrap()
                    .connect(prepared, b"", Instant::now() + TIME)
                    .unwrap()
            });
            let request = listener.next_until(Instant::now() + TIME).unwrap();
            let two = request.accept(device.prepare(), b"", Instant::now() + TIME).unwrap();
            [one.join().unwrap(), two]
        });
        if round % 20 == 0 {
            let (mut one, mut two) = ((one, device.clone()), (two, device.clone()));
            transfer(&mut one, &mut two, b"still works");
        }
    }
    drop((device, listener));
    nothing_is_left();
}

/// The kernel does not keep a reference to a channel that is not connected.
#[test]
fn what_is_prepared_and_dropped_is_gone() {
    let _alone = alone("prepared", 60);
    let (mut listener, address) = listen();
    let device = Device::first();
    let route = Route::resolve(address, Instant::now() + TIME).unwrap();
    let pending = route.prepare(device.prepare()).map_err(|(.., error)| error).unwrap();
    drop(pending);
    let route = Route::resolve(address, Instant::now() + TIME).unwrap();
    let wrong = Channel::builder(&device.domain).port(1).build().unwrap();
    drop(route.prepare(wrong).map_err(|(.., error)| error).unwrap().start(b"").unwrap());
    // The request of a peer that has gone may or may not be there.
    drop(listener.next_until(Instant::now() + Duration::from_millis(500)));
    drop((listener, device));
    nothing_is_left();
}

/// The provider unmaps a completion queue before it asks the kernel to destroy it. If the kernel refuses, nothing
/// may use the queue again, nor unmap it again: other memory may be in its place.
#[test]
fn a_failed_destroy_leaves_nothing_dangling() {
    const CHILD: &str = "SIW_TEST_CHILD";
    const NAME: &str = "a_failed_destroy_leaves_nothing_dangling";
    if std::env::var_os(CHILD).is_some() {
        return close_a_queue_that_is_in_use();
    }
    let _alone = alone("failed destroy", 120);
    // The queue is leaked for as long as the process lives.
    let output = std::process::Command::new(std::env::current_exe().unwrap())
        .args([NAME, "--exact", "--nocapture", "--test-threads=1"])
        .env(CHILD, "1")
        .output()
        .unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {error}", output.status);
    nothing_is_left();
}

fn close_a_queue_that_is_in_use() {
    const PAGE: usize = 4096;
    let context = ibverbs::open("siw0").unwrap();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(64).unwrap();
    let mut attributes = ffi::ibv_qp_init_attr {
        send_cq: queue.as_raw(),
        recv_cq: queue.as_raw(),
        cap: ffi::ibv_qp_cap {
            max_send_wr: 4,
            max_recv_wr: 4,
            max_send_sge: 1,
            max_recv_sge: 1,
            ..Default::default()
        },
        qp_type: ffi::ibv_qp_type::IBV_QPT_RC,
        ..Default::default()
    };
    // SAFETY: domain and queue are live. The crate does not know of the queue pair.
    let pair = unsafe { ffi::ibv_create_qp(domain.as_raw(), &mut attributes) };
    assert!(!pair.is_null());
    assert_eq!(queue.close().unwrap_err().kind(), ErrorKind::Busy);
    // Memory that may get the addresses where the queue was mapped.
    let pages: Vec<_> = (1..=64_u8)
        .map(|byte| {
            let access = libc::PROT_READ | libc::PROT_WRITE;
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            // SAFETY: a mapping of its own.
            let page = unsafe { libc::mmap(std::ptr::null_mut(), PAGE, access, flags, -1, 0) };
            assert_ne!(page, libc::MAP_FAILED);
            // SAFETY: the page was just mapped.
            unsafe { page.cast::<u8>().write_bytes(byte, PAGE) };
            (page.cast::<u8>(), byte)
        })
        .collect();
    // The parents work on.
    let other = context.create_cq(64).unwrap();
    assert!(other.poll(&mut [WorkCompletion::default()]).unwrap().is_empty());
    let kind = Rc;
    domain.create_qp(&other, &other, kind).build().unwrap().close().unwrap();
    other.close().unwrap();
    domain.allocate::<u8>(PAGE).unwrap().close().unwrap();
    // SAFETY: the queue pair is live, and not used again.
    assert_eq!(unsafe { ffi::ibv_destroy_qp(pair) }, 0);
    domain.close().unwrap();
    let error = context.close().unwrap_err();
    assert!(error.to_string().contains("could not be destroyed"), "{error}");
    for (page, byte) in pages {
        // SAFETY: the page is mapped, if nobody has unmapped it.
        let content = unsafe { std::slice::from_raw_parts(page, PAGE) };
        assert!(content.iter().all(|&found| found == byte), "page {byte} was written");
    }
}
