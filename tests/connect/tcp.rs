//! Connecting by address, over TCP.

use std::io::{Read, Write};
use std::net::SocketAddr;

use ibverbs::tcp::{ExchangeStage, MAX_PRIVATE_DATA, peer_has_closed, wait_until_peer_closes};
use ibverbs::{
    CompletionQueue, ErrorKind, QueuePair, QueuePairEndpoint, QueuePairState, QueuePairType, Rc,
};
use ibverbs_software::Verb;

use super::*;

/// Connects two channels by address; the private data are checked.
fn connected(rig: &Rig) -> (Channel<'static>, Channel<'static>) {
    let listener = listener();
    let address = listener.local_addr().unwrap();
    let (one, two) = (rig.prepared(), rig.prepared());
    thread::scope(|threads| {
        let client = threads.spawn(move || one.connect(address, b"from the client", soon()));
        let (two, told) = two.accept(&listener, b"from the server", soon()).unwrap();
        assert_eq!(told, b"from the client");
        let (one, told) = client.join().unwrap().unwrap();
        assert_eq!(told, b"from the server");
        (one, two)
    })
}

#[test]
fn two_channels_connect_in_one_call_each() {
    let rig = Rig::new();
    let (mut one, mut two) = connected(&rig);
    rig.talk(&mut one, &mut two);
    assert!(!one.peer_is_gone().unwrap() && !two.peer_is_gone().unwrap());
    drop((one, two));
    rig.assert_nothing_left();
}

#[test]
fn two_queue_pairs_too() {
    let rig = Rig::new();
    let queue = Arc::new(CompletionQueue::new(rig.domain.context(), 16).unwrap());
    let build = || {
        let kind = Rc;
        QueuePair::builder(&rig.domain, &queue, &queue, kind).build().unwrap()
    };
    let listener = listener();
    let address = listener.local_addr().unwrap();
    let (one, two) = (build(), build());
    thread::scope(|threads| {
        let client = threads.spawn(move || one.connect(address, &[], soon()));
        let (two, told, to_one) = two.accept(&listener, &[7; 3], soon()).unwrap();
        assert!(told.is_empty());
        let (one, told, to_two) = client.join().unwrap().unwrap();
        assert_eq!(told, [7; 3]);
        for queue_pair in [&one, &two] {
            assert_eq!(queue_pair.state().unwrap(), QueuePairState::ReadyToSend);
        }
        assert!(!peer_has_closed(&to_one).unwrap());
        drop(to_two);
        assert!(wait_until_peer_closes(&to_one, soon()).unwrap());
    });
    drop((queue, listener));
    rig.assert_nothing_left();
}

#[test]
fn private_data_have_a_limit_that_is_met_exactly() {
    let rig = Rig::new();
    let listener = listener();
    let address = listener.local_addr().unwrap();
    let most: Vec<u8> = (0..MAX_PRIVATE_DATA).map(|index| index as u8).collect();
    let (one, two) = (rig.prepared(), rig.prepared());
    thread::scope(|threads| {
        let client = threads.spawn(|| one.connect(address, &most, soon()));
        let (_two, told) = two.accept(&listener, &most, soon()).unwrap();
        assert!(told == most && client.join().unwrap().unwrap().1 == most);
    });
    let too_much = [&most[..], &[0]].concat();
    let mut stream = tcp_pair();
    let result = error(rig.prepared().connect_over(&mut stream.0, &too_much, soon()));
    assert!(matches!(result, ExchangeError::PrivateDataTooLong(8193)), "{result}");
    // Nothing was sent.
    stream.1.set_nonblocking(true).unwrap();
    assert_eq!(stream.1.read(&mut [0]).unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
    drop((stream, listener));
    rig.assert_nothing_left();
}

#[test]
fn the_stream_is_a_sign_of_life() {
    let rig = Rig::new();
    let (mut one, two) = connected(&rig);
    // Bytes that the peer has sent and nobody has read do not hide that the peer is gone.
    two.stream().unwrap().write_all(b"unread").unwrap();
    assert!(!one.wait_until_peer_is_gone(at_once()).unwrap());
    drop(two);
    assert!(one.wait_until_peer_is_gone(soon()).unwrap() && one.peer_is_gone().unwrap());
    let mut stream = one.take_stream().unwrap();
    let mut rest = String::new();
    stream.read_to_string(&mut rest).unwrap();
    assert_eq!(rest, "unread");
    let reason = one.peer_is_gone().unwrap_err();
    assert_eq!(reason.kind(), std::io::ErrorKind::NotConnected);
    assert!(one.stream().is_none() && one.take_stream().is_none());
    drop((one, stream));
    rig.assert_nothing_left();
}

#[test]
fn a_reset_keeps_the_stream_and_connects_again_over_it() {
    let rig = Rig::new();
    let (mut one, mut two) = connected(&rig);
    for _ in 0..3 {
        let mut streams = [&mut one, &mut two].map(|channel| channel.take_stream().unwrap());
        let (again, other) = (one.reset().unwrap(), two.reset().unwrap());
        let [here, there] = &mut streams;
        (one, two) = thread::scope(|threads| {
            let client = threads.spawn(move || again.connect_over(here, b"", soon()).unwrap().0);
            let two = other.accept_over(there, b"", soon()).unwrap().0;
            (client.join().unwrap(), two)
        });
        rig.talk(&mut one, &mut two);
        // With the steps called by hand, the stream stays as it is.
        drop(streams);
        (one, two) = {
            drop((one, two));
            connected(&rig)
        };
        let (again, other) = (one.reset().unwrap(), two.reset().unwrap());
        let (to_one, to_two) = (again.endpoint(), other.endpoint());
        (one, two) = (again.handshake(to_two).unwrap(), other.handshake(to_one).unwrap());
        assert!(!one.peer_is_gone().unwrap() && !two.peer_is_gone().unwrap());
    }
    drop((one, two));
    rig.assert_nothing_left();
}

/// Whatever fails, and after whichever step, the same channel connects in the end, even one that was reset.
#[test]
fn attempts_that_fail_lose_no_channel() {
    let rig = Rig::new();
    let free: SocketAddr = listener().local_addr().unwrap();
    let (one, two) = connected(&rig);
    let (one, two) = (one.reset().unwrap(), two.reset().unwrap());
    let numbers = [&one, &two].map(|prepared| prepared.endpoint().num());
    // Attempts fail since nothing listens, no client comes, or the peer closes at once.
    let one = one.connect(free, b"", soon()).unwrap_err();
    assert!(matches!(one.error, ExchangeError::NoConnection { .. }), "{one}");
    let doors = listener();
    let two = two.accept(&doors, b"", at_once()).unwrap_err();
    assert!(matches!(two.error, ExchangeError::TimedOut(_)), "{two}");
    let (mut closed, other_end) = tcp_pair();
    drop(other_end);
    let one = one.object.connect_over(&mut closed, b"", soon()).unwrap_err();
    assert!(matches!(one.error, ExchangeError::Closed(_)), "{one}");
    let (one, two) = (one.object, two.object);
    assert_eq!([&one, &two].map(|prepared| prepared.endpoint().num()), numbers);

    // A verb fails on one side: the other has made its handshake by then.
    rig.device.fail_next(Verb::ModifyQp, libc::ENETUNREACH);
    let mut streams = tcp_pair();
    let (one, two) = thread::scope(|threads| {
        let client = threads.spawn(|| one.connect_over(&mut streams.0, b"", soon()));
        let two = two.accept_over(&mut streams.1, b"", soon());
        (client.join().unwrap().unwrap_err(), two.unwrap_err())
    });
    let reasons = [&one.error, &two.error].map(|error| match error {
        ExchangeError::Verbs(error) => (true, error.raw_os_error()),
        ExchangeError::Peer { errno } => (false, Some(*errno)),
        other => panic!("{other}"),
    });
    let errno = Some(libc::ENETUNREACH);
    assert!(reasons.contains(&(true, errno)) && reasons.contains(&(false, errno)), "{reasons:?}");

    // Both channels connect at last.
    let address = doors.local_addr().unwrap();
    let (mut one, mut two) = thread::scope(|threads| {
        let client = threads.spawn(|| one.object.connect(address, b"", soon()).unwrap().0);
        let two = two.object.accept(&doors, b"", soon()).unwrap().0;
        (client.join().unwrap(), two)
    });
    rig.talk(&mut one, &mut two);
    drop((one, two, doors, closed, streams));
    rig.assert_nothing_left();
}

#[test]
fn a_queue_pair_survives_attempts_that_fail() {
    let rig = Rig::new();
    let free: SocketAddr = listener().local_addr().unwrap();
    let queue = Arc::new(CompletionQueue::new(rig.domain.context(), 8).unwrap());
    let kind = Rc;
    let prepared = QueuePair::builder(&rig.domain, &queue, &queue, kind).build().unwrap();
    let endpoint = prepared.endpoint();
    let failed = prepared.connect(free, b"", soon()).unwrap_err();
    rig.device.let_pass(Verb::ModifyQp, 1);
    rig.device.fail_next(Verb::ModifyQp, libc::ENETUNREACH);
    let failed = failed.object.handshake(endpoint).unwrap_err();
    assert_eq!(failed.error.raw_os_error(), Some(libc::ENETUNREACH));
    assert_eq!(failed.object.endpoint(), endpoint);
    drop(failed.object.handshake(endpoint).unwrap());
    drop(queue);
    rig.assert_nothing_left();
}

#[test]
fn nobody_there_is_an_error_in_time() {
    let rig = Rig::new();
    // A port that nobody listens on.
    let free: SocketAddr = listener().local_addr().unwrap();
    let reason = error(rig.prepared().connect(free, b"", soon()));
    assert!(
        matches!(&reason, ExchangeError::NoConnection { address, .. } if *address == free),
        "{reason}"
    );
    assert_eq!(reason.raw_os_error(), Some(libc::ECONNREFUSED));
    assert!(reason.to_string().contains(&free.to_string()), "{reason}");
    let none: &[SocketAddr] = &[];
    assert!(matches!(error(rig.prepared().connect(none, b"", soon())), ExchangeError::Io(_)));

    let listener = listener();
    let start = Instant::now();
    let reason = error(rig.prepared().accept(&listener, b"", at_once()));
    assert!(matches!(reason, ExchangeError::TimedOut(ExchangeStage::Stream)), "{reason}");
    assert!(start.elapsed() >= Duration::from_millis(100));
    // The listener does not accept: the kernel completes the TCP connection, but no greeting comes.
    let address = listener.local_addr().unwrap();
    let reason = error(rig.prepared().connect(address, b"", at_once()));
    assert!(matches!(reason, ExchangeError::TimedOut(ExchangeStage::Addresses)), "{reason}");
    let past = Instant::now() - Duration::from_secs(1);
    let reason = error(rig.prepared().connect(address, b"", past));
    assert_eq!(reason.kind(), ErrorKind::TimedOut, "{reason}");
    drop(listener);
    rig.assert_nothing_left();
}

#[test]
fn the_second_address_is_tried_where_the_first_does_not_answer() {
    let rig = Rig::new();
    let free = super::listener().local_addr().unwrap();
    let listener = super::listener();
    let addresses = [free, listener.local_addr().unwrap()];
    let (one, two) = (rig.prepared(), rig.prepared());
    thread::scope(|threads| {
        let client = threads.spawn(move || one.connect(&addresses[..], b"", soon()).map(drop));
        drop(two.accept(&listener, b"", soon()).unwrap());
        client.join().unwrap().unwrap();
    });
    drop(listener);
    rig.assert_nothing_left();
}

#[test]
fn a_listener_waits_as_before_afterwards() {
    let rig = Rig::new();
    let listener = listener();
    let address = listener.local_addr().unwrap();
    for nonblocking in [false, true] {
        listener.set_nonblocking(nonblocking).unwrap();
        let (one, two) = (rig.prepared(), rig.prepared());
        thread::scope(|threads| {
            let client = threads.spawn(move || one.connect(address, b"", soon()).map(drop));
            drop(two.accept(&listener, b"", soon()).unwrap());
            client.join().unwrap().unwrap();
        });
        // SAFETY: the listener is open; this asks for its flags.
        let flags =
            unsafe { libc::fcntl(std::os::fd::AsRawFd::as_raw_fd(&listener), libc::F_GETFL) };
        assert_eq!(flags & libc::O_NONBLOCK != 0, nonblocking);
    }
    drop(listener);
    rig.assert_nothing_left();
}

/// Both sides get an error, whichever of them fails its handshake.
#[test]
fn a_handshake_that_fails_is_told_to_both() {
    let rig = Rig::new();
    for step in 0..6 {
        let listener = listener();
        let address = listener.local_addr().unwrap();
        let (one, two) = (rig.prepared(), rig.prepared());
        rig.device.let_pass(Verb::ModifyQp, step);
        rig.device.fail_next(Verb::ModifyQp, libc::ENOMEM);
        let (client, server) = thread::scope(|threads| {
            let client = threads.spawn(move || one.connect(address, b"", soon()).map(drop));
            let server = two.accept(&listener, b"", soon()).map(drop);
            (client.join().unwrap(), server)
        });
        rig.device.clear_failures();
        let sides = [error(client), error(server)];
        let verbs = sides.iter().filter(|side| {
            matches!(side, ExchangeError::Verbs(error) if error.kind() == ErrorKind::Resource)
        });
        assert_eq!(verbs.count(), 1, "step {step}: {sides:?}");
        let peers =
            sides.iter().filter(|side| matches!(side, ExchangeError::Peer { errno: libc::ENOMEM }));
        assert_eq!(peers.count(), 1, "step {step}: {sides:?}");
        drop(listener);
        rig.assert_nothing_left();
    }
}

#[test]
fn a_hundred_connections_leave_nothing() {
    let rig = Rig::new();
    for _ in 0..100 {
        let (mut one, mut two) = connected(&rig);
        rig.talk(&mut one, &mut two);
    }
    rig.assert_nothing_left();
}

/// The example of `Channel`, run by both sides.
#[test]
fn both_sides_can_send_first() {
    let rig = Rig::new();
    let (one, two) = connected(&rig);
    thread::scope(|threads| {
        for mut channel in [one, two] {
            let mut region = MemoryRegion::<u8>::new(&rig.domain, 64).unwrap();
            threads.spawn(move || {
                region[..5].copy_from_slice(b"hello");
                let (message, room) = region.slice_mut(..).unwrap().split_at(5).unwrap();
                let said = channel.scope_until(soon(), |scope| {
                    let receive = scope.post_receive(room)?;
                    scope.post_send(message)?.wait()?;
                    let (room, completion) = receive.wait()?;
                    Ok::<_, ibverbs::TransportError>(
                        room[..completion.byte_len() as usize].to_vec(),
                    )
                });
                assert_eq!(said.unwrap(), b"hello");
                // The peer's device executes reads from ours until the peer has all that it needs.
                channel.stream().unwrap().shutdown(std::net::Shutdown::Write).unwrap();
                assert!(channel.wait_until_peer_is_gone(soon()).unwrap());
            });
        }
    });
    rig.assert_nothing_left();
}

/// Both sides refuse a connection that would not carry anything, for lack of what it needs on both sides.
#[test]
fn what_does_not_fit_is_refused_on_both_sides_with_both_values() {
    let rig = Rig::new();
    let listener = listener();
    let address = listener.local_addr().unwrap();
    let one = Channel::builder(&rig.domain).build().unwrap();
    let kind = QueuePairType::UnreliableConnected;
    let two = Channel::builder(&rig.domain).queue_pair_type(kind).build().unwrap();
    thread::scope(|threads| {
        let client = threads.spawn(move || one.connect(address, b"", soon()).unwrap_err().error);
        let accepted = two.accept(&listener, b"", soon()).unwrap_err().error;
        for (error, text) in [
            (accepted, "ours is a UC queue pair, and the peer's an RC one"),
            (client.join().unwrap(), "ours is an RC queue pair, and the peer's a UC one"),
        ] {
            assert_eq!(error.kind(), ErrorKind::InvalidInput);
            assert!(error.to_string().contains(text), "{error}");
        }
    });
    let prepared = || Channel::builder(&rig.domain).build().unwrap();
    let peer = prepared().endpoint();
    assert_eq!(
        (peer.transport(), peer.pkey()),
        (Some(QueuePairType::ReliableConnected), Some(0xffff))
    );
    let failed = prepared().handshake(peer.with_pkey(0x8001)).unwrap_err();
    let text = "our P_Key is 0xffff, and the peer's 0x8001";
    assert!(failed.error.to_string().contains(text), "{}", failed.error);
    drop(failed);
    // A peer of another program, which says less.
    let bare = QueuePairEndpoint::new(peer.num(), peer.lid(), peer.gid()).unwrap();
    drop(prepared().handshake(bare).unwrap());
    drop(listener);
    rig.assert_nothing_left();
}

#[test]
fn flow_control_needs_a_peer_that_answers_reads() {
    let rig = Rig::new();
    let prepared = || Channel::builder(&rig.domain).flow_control(true).build().unwrap();
    let peer = prepared().endpoint().with_max_dest_rd_atomic(0);
    let failed = prepared().handshake(peer).unwrap_err();
    let text = "for flow_control, the number of reads that the peer answers is 0";
    assert!(failed.error.to_string().contains(text), "{}", failed.error);
    drop(failed);
    rig.assert_nothing_left();
}
