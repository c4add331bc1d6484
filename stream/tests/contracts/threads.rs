//! Streams of threads.

use std::io::{BufRead, ErrorKind, IoSlice, Read, Write};
use std::net::Shutdown;
use std::thread;
use std::time::{Duration, Instant};

use ibverbs_stream::{Listener, Stream, StreamError};

use super::{Host, PATIENCE, data, soon};

/// Two ends of a stream.
fn pair(one: &Host, two: &Host) -> (Stream, Stream) {
    let listener = Listener::bind(&two.hub, "127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::scope(|threads| {
        let connects = threads.spawn(|| Stream::connect(&one.hub, address, soon()).unwrap());
        let (two, from) = listener.accept().unwrap();
        let one = connects.join().unwrap();
        assert_eq!(one.peer_addr().unwrap(), address);
        assert_eq!(one.local_addr().unwrap(), from);
        (one, two)
    })
}

#[test]
fn bytes_arrive_in_order_whatever_the_pieces_are() {
    for receives in [1, 8] {
        let hosts = [(); 2].map(|()| Host::with(|hub| hub.chunk(1000).receives(receives).sends(2)));
        let (mut one, mut two) = pair(&hosts[0], &hosts[1]);
        let all = data(300_000);
        thread::scope(|threads| {
            let writes = threads.spawn(|| {
                let mut at = 0;
                for len in (1..).map(|n: usize| n * n % 5003) {
                    let end = (at + len).min(all.len());
                    one.write_all(&all[at..end]).unwrap();
                    at = end;
                    if at == all.len() {
                        break;
                    }
                }
                one.shutdown(Shutdown::Write).unwrap();
                let mut back = Vec::new();
                one.read_to_end(&mut back).unwrap();
                back
            });
            let mut got = Vec::new();
            two.read_to_end(&mut got).unwrap();
            assert!(got == all);
            assert_eq!(two.read(&mut [0; 8]).unwrap(), 0, "the end stays");
            // The other direction goes on.
            two.write_all(&got[..1000]).unwrap();
            drop(two);
            assert!(writes.join().unwrap() == all[..1000]);
        });
    }
}

#[test]
fn lines_are_read_and_pieces_written_in_one_message() {
    let hosts = [Host::new(), Host::new()];
    let (mut one, mut two) = pair(&hosts[0], &hosts[1]);
    let pieces = [IoSlice::new(b"one\ntw"), IoSlice::new(b""), IoSlice::new(b"o\nthree")];
    assert_eq!(one.write_vectored(&pieces).unwrap(), 13);
    one.shutdown(Shutdown::Write).unwrap();
    assert_eq!(one.write(b"more").unwrap_err().kind(), ErrorKind::BrokenPipe);
    assert_eq!(hosts[0].hub.stats().messages, 1);
    let lines: Vec<_> = (&mut two).lines().map(Result::unwrap).collect();
    assert_eq!(lines, ["one", "two", "three"]);
}

#[test]
fn a_timeout_loses_nothing() {
    let hosts = [(); 2].map(|()| Host::with(|hub| hub.chunk(256).receives(2).sends(1)));
    let (mut one, mut two) = pair(&hosts[0], &hosts[1]);
    two.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
    assert_eq!(two.read(&mut [0; 8]).unwrap_err().kind(), ErrorKind::WouldBlock);
    // Without a reader, a writer stops; what was not taken is not sent.
    one.set_write_timeout(Some(Duration::from_millis(5))).unwrap();
    let (all, mut sent, mut refused) = (data(10_000), 0, 0);
    let deadline = Instant::now() + PATIENCE;
    while sent < 400 || refused < 4 {
        match one.write(&all[sent..sent + 100]) {
            Ok(taken) => (sent, refused) = (sent + taken, 0),
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::WouldBlock);
                refused += 1;
            }
        }
        assert!(Instant::now() < deadline, "{sent} bytes are on their way");
    }
    assert!(sent < 2000, "{sent} bytes are on their way");
    two.set_read_timeout(None).unwrap();
    one.set_write_timeout(None).unwrap();
    thread::scope(|threads| {
        threads.spawn(|| {
            one.write_all(&all[sent..]).unwrap();
            one.shutdown(Shutdown::Write).unwrap();
        });
        let mut got = Vec::new();
        two.read_to_end(&mut got).unwrap();
        assert!(got == all);
    });
}

#[test]
fn two_threads_use_the_halves_and_many_share_a_hub() {
    let hosts = [Host::new(), Host::new()];
    let pairs: Vec<_> = (0..4).map(|_| pair(&hosts[0], &hosts[1])).collect();
    let all = data(200_000);
    thread::scope(|threads| {
        for (one, two) in pairs {
            for stream in [one, two] {
                let (mut read, mut write) = stream.into_split();
                let all = &all;
                threads.spawn(move || {
                    for piece in all.chunks(700) {
                        write.write_all(piece).unwrap();
                    }
                    write.shutdown().unwrap();
                });
                threads.spawn(move || {
                    let mut got = Vec::new();
                    read.read_to_end(&mut got).unwrap();
                    assert!(got == *all);
                });
            }
        }
    });
    let counts = hosts.map(|host| host.hub.stats().connections);
    assert_eq!(counts, [0, 0], "streams are left");
}

#[test]
fn what_was_written_arrives_though_the_stream_is_dropped() {
    let hosts = [Host::new(), Host::new()];
    for _ in 0..10 {
        let (mut one, mut two) = pair(&hosts[0], &hosts[1]);
        one.write_all(b"the last words").unwrap();
        thread::scope(|threads| {
            threads.spawn(|| drop(one));
            let mut got = String::new();
            two.read_to_string(&mut got).unwrap();
            assert_eq!(got, "the last words");
        });
        // All that was written has arrived: there is nothing.
        two.shutdown(Shutdown::Write).unwrap();
    }
}

#[test]
fn what_a_peer_that_is_gone_does_not_take_is_an_error() {
    let hosts = [Host::new(), Host::new()];
    for _ in 0..10 {
        let (one, mut two) = pair(&hosts[0], &hosts[1]);
        thread::scope(|threads| {
            threads.spawn(|| drop(one));
            assert_eq!(two.read(&mut [0; 8]).unwrap(), 0);
        });
        // The peer reads no more.
        let refused = loop {
            if let Err(error) = two.write(b"into the void") {
                break error;
            }
        };
        assert_eq!(refused.kind(), ErrorKind::BrokenPipe);
    }
}

#[test]
fn a_peer_that_drops_what_it_has_not_read_resets() {
    let hosts = [Host::new(), Host::new()];
    let (mut one, mut two) = pair(&hosts[0], &hosts[1]);
    two.write_all(b"first").unwrap();
    one.write_all(b"nobody reads this").unwrap();
    two.fill_buf().unwrap();
    thread::scope(|threads| {
        threads.spawn(|| drop(two));
        let mut got = [0; 5];
        one.read_exact(&mut got).unwrap();
        assert_eq!(&got, b"first", "all that has arrived is read first");
        let error = one.read(&mut got).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
        let inner = error.get_ref().unwrap().downcast_ref::<StreamError>();
        assert_eq!(inner, Some(&StreamError::Reset));
        assert_eq!(one.read(&mut got).unwrap_err().kind(), ErrorKind::ConnectionReset);
        assert_eq!(one.take_error(), Some(StreamError::Reset));
    });
}

/// The stream has not polled since the bytes arrived: dropping it leaves them unread all the same.
#[test]
fn what_has_arrived_unseen_is_unread() {
    let host = Host::new();
    for answers in [false, true] {
        let (mut one, mut two) = pair(&host, &host);
        if answers {
            two.write_all(b"answer").unwrap();
        }
        one.write_all(b"unread").unwrap();
        one.flush().unwrap();
        host.wait_until_all_has_arrived();
        drop(two);
        let mut got = Vec::new();
        let error = one.read_to_end(&mut got).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{error}");
        assert_eq!(got, if answers { b"answer".to_vec() } else { Vec::new() });
        assert_eq!(one.take_error(), Some(StreamError::Reset));
    }
}

#[test]
fn reading_can_be_shut_down() {
    let hosts = [(); 2].map(|()| Host::with(|hub| hub.chunk(256).receives(2)));
    let (mut one, mut two) = pair(&hosts[0], &hosts[1]);
    one.write_all(b"unread").unwrap();
    two.shutdown(Shutdown::Read).unwrap();
    assert_eq!(two.read(&mut [0; 8]).unwrap(), 0);
    thread::scope(|threads| {
        let hub = &hosts[1].hub;
        threads.spawn(|| hub.run().unwrap());
        // The peer sends more than there are receives for: what arrives is thrown away.
        one.write_all(&data(10_000)).unwrap();
        one.shutdown(Shutdown::Write).unwrap();
        assert_eq!(two.read(&mut [0; 8]).unwrap(), 0);
        hub.stop();
    });
}

#[test]
fn a_hub_that_is_run_gathers_small_writes() {
    let hosts = [Host::new(), Host::new()];
    let (mut one, mut two) = pair(&hosts[0], &hosts[1]);
    thread::scope(|threads| {
        for host in &hosts {
            threads.spawn(|| host.hub.run().unwrap());
        }
        while hosts.iter().any(|host| host.hub.stats().sleeps == 0) {
            thread::yield_now();
        }
        let all = data(64 * 2000);
        let reads = threads.spawn(move || {
            let mut got = Vec::new();
            two.read_to_end(&mut got).unwrap();
            got
        });
        for piece in all.chunks(64) {
            one.write_all(piece).unwrap();
        }
        one.shutdown(Shutdown::Write).unwrap();
        assert!(reads.join().unwrap() == all);
        drop(one);
        hosts.iter().for_each(|host| host.hub.stop());
    });
    let messages = hosts[0].hub.stats().messages;
    assert!(messages < 1000, "2000 writes are {messages} messages");
    let error = Stream::connect(&hosts[0].hub, "127.0.0.1:1", soon()).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::ConnectionRefused | ErrorKind::ConnectionAborted));
}

#[test]
fn small_writes_of_a_thread_are_gathered_and_arrive_without_another_call() {
    let hosts = [Host::new(), Host::new()];
    let (mut one, mut two) = pair(&hosts[0], &hosts[1]);
    let all = data(64 * 2000);
    thread::scope(|threads| {
        let (has_written, comes) = std::sync::mpsc::channel();
        let all = &all;
        let reads = threads.spawn(move || {
            let mut got = vec![0; all.len()];
            two.read_exact(&mut got).unwrap();
            assert!(got == *all);
            // This thread has made no call since its last write, and the stream is there.
            has_written.send(two).unwrap();
        });
        for piece in all.chunks(64) {
            one.write_all(piece).unwrap();
        }
        let two = comes.recv_timeout(super::PATIENCE).expect("the last bytes never arrive");
        reads.join().unwrap();
        drop((one, two));
    });
    let messages = hosts[0].hub.stats().messages;
    assert!(messages < 1000, "2000 writes are {messages} messages");
}

/// What was in flight has arrived, though nobody has polled since: a later write is not held back for it.
#[test]
fn a_thread_that_writes_now_and_then_has_each_write_sent_at_once() {
    let hosts = [Host::new(), Host::new()];
    let (mut one, mut two) = pair(&hosts[0], &hosts[1]);
    let received = || hosts[0].device.counters().packets_received;
    let before = received();
    one.write_all(b"1").unwrap();
    two.read_exact(&mut [0]).unwrap();
    while received() == before {
        thread::yield_now();
    }
    one.write_all(b"2").unwrap();
    assert_eq!(hosts[0].hub.stats().messages, 2);
    two.read_exact(&mut [0]).unwrap();
}

/// Threads share a `TcpStream` in an `Arc` in the same way.
#[test]
fn two_threads_share_a_stream_by_reference() {
    let hosts = [(); 2].map(|()| Host::new());
    let (one, two) = pair(&hosts[0], &hosts[1]);
    let all = data(300_000);
    thread::scope(|threads| {
        for stream in [&one, &two] {
            let all = &all;
            threads.spawn(move || {
                let mut to = stream;
                to.write_all(all).unwrap();
                to.flush().unwrap();
            });
            threads.spawn(move || {
                let (mut from, mut got) = (stream, vec![0; all.len()]);
                from.read_exact(&mut got).unwrap();
                assert!(got == *all);
            });
        }
    });
    // Bytes that were not consumed are there for the other form.
    let (mut one, two) = (one, two);
    (&two).write_all(b"some more").unwrap();
    assert_eq!(one.fill_buf().unwrap()[..1], b"s"[..]);
    one.consume(5);
    let mut rest = [0; 4];
    (&one).read_exact(&mut rest).unwrap();
    assert_eq!(&rest, b"more");
    // Two readers take turns, and each keeps to the timeout.
    one.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
    thread::scope(|threads| {
        for _ in 0..2 {
            threads.spawn(|| {
                let kind = (&one).read(&mut [0; 8]).unwrap_err().kind();
                assert_eq!(kind, ErrorKind::WouldBlock);
            });
        }
    });
}

#[test]
fn several_threads_accept_and_each_keeps_to_its_deadline() {
    let hosts = [(); 2].map(|()| Host::new());
    let listener = Listener::bind(&hosts[1].hub, "127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::scope(|threads| {
        // An accept that begins after the deadline was set begins again.
        let accept = || loop {
            match listener.accept() {
                Err(error) if error.kind() == ErrorKind::WouldBlock => thread::yield_now(),
                accepted => break accepted.unwrap(),
            }
        };
        let waits = [(); 3].map(|()| threads.spawn(accept));
        // This call keeps to its deadline while the others wait for ever, and a client says nothing.
        let silent = std::net::TcpStream::connect(address).unwrap();
        listener.set_deadline(Some(std::time::Instant::now() + Duration::from_millis(20)));
        assert_eq!(listener.accept().unwrap_err().kind(), ErrorKind::WouldBlock);
        listener.set_deadline(None);
        let clients = [(); 3].map(|()| Stream::connect(&hosts[0].hub, address, soon()).unwrap());
        let mut accepted = waits.map(|thread| thread.join().unwrap().1);
        let mut connected = clients.each_ref().map(|client| client.local_addr().unwrap());
        accepted.sort();
        connected.sort();
        assert_eq!(accepted, connected);
        drop(silent);
    });
}

/// Another thread sees to the end of the streams.
#[test]
fn a_place_that_is_free_can_be_taken_at_once() {
    let hosts = [Host::with(|hub| hub.max_connections(1)), Host::new()];
    let listener = Listener::bind(&hosts[1].hub, "127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let mut result = Ok(());
    thread::scope(|threads| {
        hosts.iter().for_each(|host| drop(threads.spawn(|| host.hub.run().unwrap())));
        threads.spawn(|| while listener.accept().is_ok() {});
        for _ in 0..200 {
            result = Stream::connect(&hosts[0].hub, address, soon()).map(drop);
            if result.is_err() {
                break;
            }
            while hosts[0].hub.stats().connections > 0 {
                thread::yield_now();
            }
        }
        hosts.iter().for_each(|host| host.hub.stop());
    });
    result.unwrap();
}
