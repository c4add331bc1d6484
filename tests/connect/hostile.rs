//! Peers that violate the protocol, at every step of the exchange.

use std::io::{self, Read, Write};
use std::net::Shutdown;

use ibverbs::DeadlineStream;
use proptest::prelude::*;

use super::*;
#[path = "../hostile_input/mutation.rs"]
mod mutation;
#[path = "../support/property_tests.rs"]
mod property_tests;
use mutation::{mutated, mutations};

/// What a client sends whose queue pair will be the next one: a greeting, and that it is ready.
fn recorded(rig: &Rig) -> (Vec<u8>, Vec<u8>) {
    let prepared = rig.prepared();
    let (mut ours, mut theirs) = tcp_pair();
    // This client gets no answer.
    theirs.shutdown(Shutdown::Write).unwrap();
    let reason = error(prepared.connect_over(&mut ours, b"private", soon()));
    assert!(matches!(reason, ExchangeError::Closed), "{reason}");
    drop(ours);
    let mut greeting = Vec::new();
    theirs.read_to_end(&mut greeting).unwrap();
    (greeting, vec![1, 0, 0, 0, 0])
}

/// Accepts a client that sends these bytes and then closes the connection, or stays silent.
fn accepts(rig: &Rig, bytes: &[u8], then: Option<Shutdown>, until: Instant) -> ExchangeError {
    let (mut client, mut server) = tcp_pair();
    client.write_all(bytes).unwrap();
    if let Some(how) = then {
        client.shutdown(how).unwrap();
    }
    let reason = error(rig.prepared().accept_over(&mut server, b"ours", until));
    drop((client, server));
    rig.assert_nothing_left();
    reason
}

#[test]
fn a_peer_that_ends_in_the_middle_is_told_from_one_that_is_silent() {
    let rig = Rig::new();
    let (greeting, ready) = recorded(&rig);
    let all = [greeting, ready].concat();
    // The message cut at every byte, and the error of a message that lacks its very end.
    for len in 0..all.len() {
        for how in [Shutdown::Write, Shutdown::Both] {
            let reason = accepts(&rig, &all[..len], Some(how), soon());
            assert!(matches!(reason, ExchangeError::Closed), "after {len} bytes: {reason}");
        }
    }
    for len in [0, 1, 11, 12, 30, all.len() - 6, all.len() - 1] {
        let start = Instant::now();
        let reason = accepts(&rig, &all[..len], None, at_once());
        assert!(matches!(reason, ExchangeError::TimedOut), "after {len} bytes: {reason}");
        assert!(start.elapsed() >= Duration::from_millis(100));
    }
}

#[test]
fn a_peer_that_drips_does_not_get_more_time() {
    let rig = Rig::new();
    let (greeting, _) = recorded(&rig);
    let (mut client, mut server) = tcp_pair();
    thread::scope(|threads| {
        threads.spawn(move || {
            for byte in greeting {
                thread::sleep(Duration::from_millis(20));
                if client.write_all(&[byte]).is_err() {
                    return;
                }
            }
        });
        let start = Instant::now();
        let reason = error(rig.prepared().accept_over(&mut server, b"", at_once()));
        assert!(matches!(reason, ExchangeError::TimedOut), "{reason}");
        assert!(start.elapsed() >= Duration::from_millis(100));
        drop(server);
    });
    rig.assert_nothing_left();
}

#[test]
fn other_programs_and_other_versions_are_told_by_name() {
    let rig = Rig::new();
    let (greeting, _) = recorded(&rig);
    let reason = accepts(&rig, b"GET / HTTP/1.1\r\n\r\n", None, soon());
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
    drop(client);

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
        let reason = accepts(&rig, &[&greeting[..], &verdict].concat(), None, soon());
        assert!(matches!(reason, ExchangeError::Protocol(_)), "{verdict:?}: {reason}");
    }
    let failed = [&greeting[..], &[2, 0, 0, 0, 13]].concat();
    let reason = accepts(&rig, &failed, None, soon());
    assert!(matches!(reason, ExchangeError::Peer { errno: libc::EACCES }), "{reason}");
}

/// A stream in memory: reads return the peer's bytes, and writes are kept.
struct Recorded {
    bytes: io::Cursor<Vec<u8>>,
}

impl Read for Recorded {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.bytes.read(bytes)
    }
}

impl Write for Recorded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl DeadlineStream for Recorded {
    fn set_deadline(&mut self, _: Option<Instant>) -> io::Result<()> {
        Ok(())
    }
}

/// Both roles with a peer that sends these bytes: they connect, or end with a typed error, and leave nothing
/// behind.
fn meets(rig: &Rig, bytes: &[u8]) {
    for connects in [false, true] {
        let mut stream = Recorded { bytes: io::Cursor::new(bytes.to_vec()) };
        let prepared = rig.prepared();
        let result = if connects {
            prepared.connect_over(&mut stream, b"ours", soon())
        } else {
            prepared.accept_over(&mut stream, b"ours", soon())
        };
        match result.map_err(ExchangeError::from) {
            Ok((channel, told)) => {
                assert!(told.len() <= ibverbs::MAX_PRIVATE_DATA);
                drop(channel);
            }
            Err(ExchangeError::Io(error)) => panic!("{error}"),
            Err(error) => assert!(!error.to_string().is_empty()),
        }
        rig.assert_nothing_left();
    }
}

proptest! {
    #![proptest_config(property_tests::config(300))]

    #[test]
    fn any_bytes_connect_or_are_refused(
        bytes in prop::collection::vec(any::<u8>(), 0..200), with_name: bool, version in 0..3_u8,
    ) {
        let rig = Rig::new();
        let bytes = if with_name { [b"ibverbs", &[version][..], &bytes].concat() } else { bytes };
        meets(&rig, &bytes);
    }

    #[test]
    fn nearly_right_bytes_connect_or_are_refused(damage in mutations(any::<u8>())) {
        let rig = Rig::new();
        let (greeting, ready) = recorded(&rig);
        meets(&rig, &mutated([greeting, ready].concat(), &damage));
    }
}
