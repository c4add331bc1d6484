//! Both sides must have flow control. Where it is not possible, an error says so.

use std::net::TcpListener;

use ibverbs::tcp::ExchangeError;
use ibverbs::{ErrorKind, Inline, QueuePairEndpoint, QueuePairType, RemoteMemoryRegion};

use super::*;

const NOT_THERE: &str = "this channel was built with flow_control, and the peer's was not";
const NOT_HERE: &str = "the peer's channel was built with flow_control, and this one was not";

#[test]
fn each_side_says_which_one_has_no_flow_control() {
    let sides = sides();
    let with = sides[0].builder().build().unwrap();
    let without = sides[1].builder().flow_control(false).build().unwrap();
    let endpoints = (with.endpoint(), without.endpoint());
    assert!(endpoints.0.credit_word().is_some() && endpoints.1.credit_word().is_none());
    let failed = with.handshake(endpoints.1).unwrap_err();
    assert_eq!(failed.error.kind(), ErrorKind::InvalidInput);
    assert!(failed.error.to_string().contains(NOT_THERE), "{}", failed.error);
    let (with, failed) = (failed.object, without.handshake(endpoints.0).unwrap_err());
    assert!(failed.error.to_string().contains(NOT_HERE), "{}", failed.error);
    // Each can be connected to a peer of its kind.
    let other = sides[1].builder().build().unwrap();
    assert_eq!(other.endpoint().credit_word().unwrap().length(), 8);
    let [mut one, mut other] = handshake([with, other]);
    let receive = kept::receive(&mut other, sides[1].buffer(0)).unwrap();
    one.wait_for_credit_until(deadline()).unwrap();
    one.until(deadline()).send(sides[0].buffer(5)).unwrap();
    assert_eq!(received(&mut other, receive), 5);
    let plain = sides[0].builder().flow_control(false).build().unwrap();
    let [mut plain, _other] = handshake([plain, failed.object]);
    assert_eq!(plain.credits(), None);
    plain.wait_for_credit().unwrap();
    let short = endpoints.0.with_credit_word(RemoteMemoryRegion::new(0, 7, 0).unwrap());
    let failed = sides[0].builder().build().unwrap().handshake(short).unwrap_err();
    assert!(failed.error.to_string().contains("less than 8 bytes"), "{}", failed.error);
}

#[test]
fn the_option_is_agreed_over_tcp() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    for (ours, theirs) in [(true, true), (true, false), (false, true), (false, false)] {
        let sides = sides();
        let prepared = sides[0].builder().flow_control(ours).build().unwrap();
        let accepting = sides[1].builder().flow_control(theirs).build().unwrap();
        thread::scope(|threads| {
            let accepting = threads.spawn(|| accepting.accept(&listener, b"data", deadline()));
            let connected = prepared.connect(address, b"", deadline());
            let accepted = accepting.join().unwrap();
            if ours == theirs {
                let ((mut one, data), (mut other, _)) = (connected.unwrap(), accepted.unwrap());
                assert_eq!(data, b"data");
                let receive = kept::receive(&mut other, sides[1].buffer(0)).unwrap();
                one.wait_for_credit_until(deadline()).unwrap();
                one.until(deadline()).send(sides[0].buffer(8)).unwrap();
                assert_eq!(received(&mut other, receive), 8);
                return;
            }
            for (has_it, error) in
                [(ours, connected.unwrap_err().error), (theirs, accepted.unwrap_err().error)]
            {
                let says = if has_it { NOT_THERE } else { NOT_HERE };
                assert!(matches!(error, ExchangeError::Verbs(_)), "{error}");
                assert!(error.to_string().contains(says), "{error}");
            }
        });
    }
}

#[test]
fn an_endpoint_of_another_form_carries_the_word() {
    let sides = sides();
    let prepared = sides.each_ref().map(|side| side.builder().build().unwrap());
    let rebuilt = prepared.each_ref().map(|prepared| {
        let endpoint = prepared.endpoint();
        let word = endpoint.credit_word().unwrap().to_bytes();
        QueuePairEndpoint::new(endpoint.num(), endpoint.lid(), endpoint.gid())
            .unwrap()
            .with_send_psn(endpoint.send_psn().unwrap())
            .with_credit_word(RemoteMemoryRegion::from_bytes(&word).unwrap())
    });
    let [one, other] = prepared;
    let mut one = one.handshake(rebuilt[1]).unwrap();
    let mut other = other.handshake(rebuilt[0]).unwrap();
    let receive = kept::receive(&mut one, sides[0].buffer(0)).unwrap();
    other.wait_for_credit_until(deadline()).unwrap();
    other.until(deadline()).send(sides[1].buffer(6)).unwrap();
    assert_eq!(received(&mut one, receive), 6);
}

#[test]
fn what_cannot_have_flow_control_is_refused() {
    let [side, _] = sides();
    let mut sharing = Loop::<PooledBuffer>::new(&side.context, 64).unwrap();
    let receives = sharing.add_shared_receives(&side.domain, 8).unwrap();
    let sharing = sharing.create_sharing_channel(&side.domain, receives).unwrap();
    for (builder, says) in [
        (side.builder().queue_pair_type(QueuePairType::UnreliableConnected), "reliable"),
        (sharing.flow_control(true), "shared receive queue"),
        (side.builder().max_rd_atomic(0), "max_rd_atomic"),
        (side.builder().max_dest_rd_atomic(0), "max_dest_rd_atomic"),
    ] {
        let error = builder.build().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
        assert!(error.to_string().contains(says), "{error}");
    }
}

/// A peer whose word holds what it likes.
#[test]
fn a_peer_that_lies_gets_no_more_than_a_message_without_a_receive() {
    let sides = sides();
    let word = SharedMemoryRegion::<u64>::new(&sides[1].domain, 1, AccessFlags::REMOTE_READ);
    let word = word.unwrap();
    let [one, other] = sides.each_ref().map(|side| side.builder().build().unwrap());
    let endpoints = (one.endpoint(), other.endpoint().with_credit_word(word.remote()));
    let mut one = one.handshake(endpoints.1).unwrap();
    let mut other = other.handshake(endpoints.0).unwrap();
    let claim = |count: u32| (u64::from(!count) << 32 | u64::from(count)).to_be();
    // No counts, and more than there can be.
    for lie in [0, 1, u64::MAX, 5_u64.to_be(), claim(u32::MAX), claim(0x8000_0000)] {
        word.write_one(0, lie).unwrap();
        let soon = Instant::now() + Duration::from_millis(2);
        assert_eq!(one.wait_for_credit_until(soon).unwrap_err(), TransportError::NoCredit);
        assert_eq!(one.credits(), Some(0));
    }
    word.write_one(0, claim(3)).unwrap();
    one.wait_for_credit_until(deadline()).unwrap();
    assert_eq!(one.credits(), Some(3));
    let receive = kept::receive(&mut other, sides[1].buffer(0)).unwrap();
    // The peer takes back what it has promised.
    word.write_one(0, claim(0)).unwrap();
    one.until(deadline()).send(sides[0].buffer(1)).unwrap();
    assert_eq!(received(&mut other, receive), 1);
    let mut left = 3;
    while left > 0 {
        let soon = Instant::now() + Duration::from_millis(1);
        match one.wait_for_credit_until(soon) {
            Err(TransportError::NoCredit) => left = 0,
            result => {
                // The sender had the credit before the peer took it back. The peer has no receive.
                result.unwrap();
                let mut sending = kept::send(&mut one, sides[0].buffer(1)).unwrap();
                assert!(sending.wait(&mut one).err().unwrap().work_error().is_some());
                return;
            }
        }
    }
}

/// A word that does not exist.
#[test]
fn a_read_that_the_peer_refuses_is_an_error_of_the_connection() {
    let sides = sides();
    let [one, other] = sides.each_ref().map(|side| side.builder().build().unwrap());
    let nowhere = RemoteMemoryRegion::new(64, 8, 0x1234).unwrap();
    let endpoints = (one.endpoint(), other.endpoint().with_credit_word(nowhere));
    let mut one = one.handshake(endpoints.1).unwrap();
    let _other = other.handshake(endpoints.0).unwrap();
    let error = one.wait_for_credit_until(deadline()).unwrap_err();
    assert!(error.work_error().is_some(), "{error}");
    let error = one.until(deadline()).send(Inline(&[])).unwrap_err();
    assert!(error.work_error().is_some(), "{error}");
    assert_eq!(kept::send(&mut one, ()).err(), Some(error));
}
