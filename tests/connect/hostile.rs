//! Peers that violate the protocol, at every step of the exchange.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};

use ibverbs_software::Verb;

use super::*;

/// Accepts a client that sends these bytes and then closes the connection, or stays silent: over a stream of the program's,
/// and from a listener.
fn accepts(
    rig: &Rig,
    bytes: &[u8],
    then: Option<Shutdown>,
    until: fn() -> Instant,
) -> ExchangeError {
    let sends = |mut client: TcpStream| {
        client.write_all(bytes).unwrap();
        if let Some(how) = then {
            client.shutdown(how).unwrap();
        }
        client
    };
    let (client, mut server) = tcp_pair();
    let client = sends(client);
    let of_stream = error(rig.prepared().accept_over(&mut server, b"ours", until()));
    drop((client, server));

    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let client = sends(TcpStream::connect(listener.local_addr().unwrap()).unwrap());
    let of_listener = error(rig.prepared().accept(&listener, b"ours", until()));
    drop((client, listener));
    assert_eq!(of_stream.to_string(), of_listener.to_string());
    rig.assert_nothing_left();
    of_stream
}

#[test]
fn a_peer_that_ends_in_the_middle_is_told_from_one_that_is_silent() {
    let rig = Rig::new();
    let (greeting, ready) = recorded(&rig);
    let all = [greeting, ready].concat();
    // The message cut at every byte, and the error of a message that lacks its very end.
    for len in 0..all.len() {
        for how in [Shutdown::Write, Shutdown::Both] {
            let reason = accepts(&rig, &all[..len], Some(how), soon);
            assert!(matches!(reason, ExchangeError::Closed(_)), "after {len} bytes: {reason}");
        }
    }
    for len in [0, 1, 11, 12, 30, all.len() - 6, all.len() - 1] {
        let start = Instant::now();
        let reason = accepts(&rig, &all[..len], None, at_once);
        assert!(matches!(reason, ExchangeError::TimedOut(_)), "after {len} bytes: {reason}");
        assert!(start.elapsed() >= Duration::from_millis(100));
    }
}

#[test]
fn a_peer_that_drips_does_not_get_more_time() {
    let rig = Rig::new();
    let (greeting, _) = recorded(&rig);
    // Whether the time was over before all had dripped.
    let is_late = |client: TcpStream, accept: &mut dyn FnMut() -> ExchangeError| {
        thread::scope(|threads| {
            let dripping = threads.spawn(|| {
                greeting.iter().try_for_each(|&byte| {
                    thread::sleep(Duration::from_millis(20));
                    (&client).write_all(&[byte])
                })
            });
            let start = Instant::now();
            let reason = accept();
            assert!(matches!(reason, ExchangeError::TimedOut(_)), "{reason}");
            assert!(start.elapsed() >= Duration::from_millis(100));
            dripping.join().unwrap().is_err()
        })
    };
    // Who begins to accept when all has dripped tries again.
    let end = Instant::now() + Duration::from_secs(60);
    for listens in [false, true] {
        while !{
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            is_late(client, &mut || {
                if listens {
                    return error(rig.prepared().accept(&listener, b"", at_once()));
                }
                let mut server = listener.accept().unwrap().0;
                error(rig.prepared().accept_over(&mut server, b"", at_once()))
            })
        } {
            assert!(Instant::now() < end, "it had the time to send all");
        }
    }
    rig.assert_nothing_left();
}

#[test]
fn other_programs_and_other_versions_are_told_by_name() {
    let rig = Rig::new();
    let (greeting, _) = recorded(&rig);
    let reason = accepts(&rig, b"GET / HTTP/1.1\r\n\r\n", None, soon);
    assert!(matches!(reason, ExchangeError::Protocol(_)), "{reason}");
    assert!(reason.to_string().contains("first bytes are not \"ibverbs\""), "{reason}");

    // A newer peer sends a longer greeting: it is read to its end, and answered by our version.
    let mut newer = greeting;
    newer[7] = 3;
    let more = u16::from_be_bytes([newer[8], newer[9]]) + 40;
    newer[8..10].copy_from_slice(&more.to_be_bytes());
    newer.extend([0xee; 40]);
    let (mut client, mut server) = tcp_pair();
    client.write_all(&newer).unwrap();
    let reason = error(rig.prepared().accept_over(&mut server, b"", soon()));
    assert!(matches!(reason, ExchangeError::Version { ours: 2, theirs: 3 }), "{reason}");
    drop(server);
    let mut answer = Vec::new();
    client.read_to_end(&mut answer).unwrap();
    assert_eq!(&answer[..8], b"ibverbs\x01");
    drop((client, listener));

    // The side that connects gets the same error.
    let (mut client, mut server) = tcp_pair();
    server.write_all(b"ibverbs\x09\0\0\0\0").unwrap();
    let reason = error(rig.prepared().connect_over(&mut client, b"", soon()));
    assert!(matches!(reason, ExchangeError::Version { ours: 2, theirs: 9 }), "{reason}");
    drop((client, server));
    rig.assert_nothing_left();
}

#[test]
fn a_false_verdict_is_refused() {
    let rig = Rig::new();
    let (greeting, _) = recorded(&rig);
    for verdict in [[0; 5], [1, 0, 0, 0, 1], [2, 0, 0, 0, 0], [2, 0x80, 0, 0, 0], [9; 5]] {
        let reason = accepts(&rig, &[&greeting[..], &verdict].concat(), None, soon);
        assert!(matches!(reason, ExchangeError::Protocol(_)), "{verdict:?}: {reason}");
    }
    let failed = [&greeting[..], &[2, 0, 0, 0, 13]].concat();
    let reason = accepts(&rig, &failed, None, soon);
    assert!(matches!(reason, ExchangeError::Peer { errno: libc::EACCES }), "{reason}");
}

/// Closing a socket with unread data may lose what was written last: our verdict.
#[test]
fn a_side_whose_handshake_fails_reads_the_verdict_of_the_peer() {
    let rig = Rig::new();
    let (greeting, ready) = recorded(&rig);
    let (mut client, mut server) = tcp_pair();
    client.write_all(&[greeting, ready].concat()).unwrap();
    let prepared = rig.prepared();
    rig.device.fail_next(Verb::ModifyQp, libc::ENETUNREACH);
    let reason = error(prepared.accept_over(&mut server, b"", soon()));
    let ExchangeError::Verbs(verbs) = &reason else { panic!("{reason}") };
    assert_eq!(verbs.raw_os_error(), Some(libc::ENETUNREACH));
    server.set_nonblocking(true).unwrap();
    let left = server.read(&mut [0; 8]).unwrap_err();
    assert_eq!(left.kind(), std::io::ErrorKind::WouldBlock, "something is unread");
    drop((client, server));
    rig.assert_nothing_left();
}

/// A program that walks the sources of an error prints each reason once.
#[test]
fn an_error_says_everything_once() {
    use std::error::Error as _;

    use ibverbs::tcp::ExchangeStage as Stage;

    let broken = || std::io::Error::from(std::io::ErrorKind::BrokenPipe);
    let address = "192.0.2.1:18515".parse().unwrap();
    for (error, reason) in [
        (ExchangeError::from(rig_error()), rig_error().to_string()),
        (ExchangeError::Io(broken()), broken().to_string()),
        (
            ExchangeError::NoConnection { address, error: broken() },
            format!("192.0.2.1:18515: {}", broken()),
        ),
        (ExchangeError::TimedOut(Stage::Stream), "waiting for a connection".to_owned()),
        (ExchangeError::TimedOut(Stage::Addresses), "before it had sent its".to_owned()),
        (ExchangeError::TimedOut(Stage::Peer), "before it had said that".to_owned()),
    ] {
        assert!(error.to_string().contains(&reason), "{error}");
        assert!(error.source().is_none(), "{error}");
    }
}

fn rig_error() -> ibverbs::Error {
    ibverbs::RemoteMemoryRegion::new(u64::MAX, 8, 1).unwrap_err()
}
