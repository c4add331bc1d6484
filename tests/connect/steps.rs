//! The exchange as a state machine: over streams that do not block, and without a stream.

use std::io::{Read, Write};

use ibverbs::PreparedChannel;
use ibverbs::tcp::{Exchange, ExchangeStage, Step};

use super::*;

type Exchanged = (Channel<'static>, Vec<u8>);

enum Side {
    Going(Box<Exchange<PreparedChannel<'static>>>),
    Done(Box<Exchanged>),
}

impl Side {
    fn advance(self) -> Self {
        match self {
            Self::Going(exchange) => match exchange.advance().unwrap() {
                Step::Pending(exchange) => Self::Going(Box::new(exchange)),
                Step::Done(connected) => Self::Done(Box::new(connected)),
            },
            done => done,
        }
    }

    /// Takes at most so many bytes of what the other side sends, which are those that it wants.
    fn takes(&mut self, from: &mut Self, most: usize) {
        if let (Self::Going(to), Self::Going(from)) = (self, from) {
            let bytes = from.to_send();
            let taken = to.received(&bytes[..bytes.len().min(most)]);
            assert!(taken <= most && (taken == bytes.len().min(most) || to.wants() == 0));
            from.sent(taken);
        }
    }

    fn done(self) -> Option<Exchanged> {
        match self {
            Self::Done(connected) => Some(*connected),
            Self::Going(_) => None,
        }
    }
}

#[test]
fn bytes_are_carried_by_whoever_has_them_and_in_any_pieces() {
    let rig = Rig::new();
    for most in [1, 7, 1000] {
        let one = rig.prepared().begin_connect(b"from one").unwrap();
        let two = rig.prepared().begin_accept(&[2; 300]).unwrap();
        let (mut one, mut two) = (Side::Going(Box::new(one)), Side::Going(Box::new(two)));
        while !matches!((&one, &two), (Side::Done(_), Side::Done(_))) {
            (one, two) = (one.advance(), two.advance());
            // The accepting side may be done when its last bytes are sent, which the other side then has.
            one.takes(&mut two, most);
            two.takes(&mut one, most);
        }
        let ((mut one, of_two), (mut two, of_one)) = (one.done().unwrap(), two.done().unwrap());
        assert!(of_two == [2; 300] && of_one == b"from one");
        rig.talk(&mut one, &mut two);
    }
    rig.assert_nothing_left();
}

#[test]
fn over_a_stream_that_does_not_block_a_step_never_waits() {
    let rig = Rig::new();
    let (mut client, mut server) = tcp_pair();
    server.set_nonblocking(true).unwrap();
    let mut exchange = rig.prepared().begin_accept(b"ours").unwrap();
    // Nothing is there yet.
    for _ in 0..3 {
        let Step::Pending(pending) = exchange.step(&mut server).unwrap() else { panic!("done") };
        assert!(pending.to_send().is_empty() && pending.wants() > 0);
        exchange = pending;
    }
    let prepared = rig.prepared();
    thread::scope(|threads| {
        let connects = threads.spawn(move || {
            let connected = prepared.connect_over(&mut client, b"theirs", soon()).unwrap();
            // These bytes are the program's: the exchange does not read them.
            client.write_all(b"and more").unwrap();
            (connected, client)
        });
        let (mut two, theirs) = loop {
            match exchange.step(&mut server).unwrap() {
                Step::Done(done) => break done,
                Step::Pending(pending) => exchange = pending,
            }
            thread::yield_now();
        };
        let ((mut one, ours), client) = connects.join().unwrap();
        assert!(theirs == b"theirs" && ours == b"ours");
        rig.talk(&mut one, &mut two);
        drop(client);
        server.set_nonblocking(false).unwrap();
        let mut rest = String::new();
        server.read_to_string(&mut rest).unwrap();
        assert_eq!(rest, "and more");
    });
    drop(server);
    rig.assert_nothing_left();
}

#[test]
fn a_peer_that_is_gone_ends_a_step_with_the_stage_and_the_channel() {
    let rig = Rig::new();
    let (greeting, _) = recorded(&rig);
    for len in [0, 5, greeting.len()] {
        let (mut client, mut server) = tcp_pair();
        client.write_all(&greeting[..len]).unwrap();
        drop(client);
        let exchange = rig.prepared().begin_accept(b"").unwrap();
        let failed = exchange.step(&mut server).unwrap_err();
        let stage = match len == greeting.len() {
            true => ExchangeStage::Peer,
            false => ExchangeStage::Addresses,
        };
        assert!(
            matches!(failed.error, ExchangeError::Closed(at) if at == stage),
            "after {len} bytes: {}",
            failed.error
        );
        // The prepared channel can connect over another stream.
        let (mut ours, mut theirs) = tcp_pair();
        let (one, two) = (failed.object, rig.prepared());
        thread::scope(|threads| {
            let connects = threads.spawn(move || one.connect_over(&mut ours, b"", soon()));
            let (mut two, _) = two.accept_over(&mut theirs, b"", soon()).unwrap();
            let (mut one, _) = connects.join().unwrap().unwrap();
            rig.talk(&mut one, &mut two);
        });
    }
    rig.assert_nothing_left();
}

#[test]
fn an_exchange_tells_what_is_wrong_before_it_begins() {
    let rig = Rig::new();
    let long = vec![0; ibverbs::tcp::MAX_PRIVATE_DATA + 1];
    for reason in
        [error(rig.prepared().begin_connect(&long)), error(rig.prepared().begin_accept(&long))]
    {
        assert!(matches!(reason, ExchangeError::PrivateDataTooLong(8193)), "{reason}");
    }
    rig.assert_nothing_left();
}
