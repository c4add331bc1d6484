//! A channel after a reset.

use ibverbs::{ErrorKind, TransportError};
use ibverbs_software::Verb;

use crate::pair::*;
use crate::software::Software;

#[test]
fn each_connection_has_a_queue_pair_of_its_own() {
    let mut pair = Pair::new();
    let mut numbers = vec![pair.one.number()];
    for _ in 0..5 {
        pair = pair.reconnect();
        assert_eq!(pair.one.endpoint().num(), pair.one.number());
        assert!(!numbers.contains(&pair.one.number()), "{numbers:?}");
        numbers.push(pair.one.number());
        pair.exchange();
        assert_eq!(pair.device.live_objects().queue_pairs, 2, "the old ones are destroyed");
    }
    pair.finish();
}

#[test]
fn where_there_is_no_room_for_another_the_channel_keeps_its_own() {
    let mut pair = Pair::new();
    let (number, psn) = (pair.one.number(), pair.one.endpoint().send_psn());
    pair.device.fail_always(Verb::CreateQp, libc::ENOMEM);
    pair = pair.reconnect();
    assert_eq!(pair.one.number(), number);
    // Two random numbers of 24 bits are equal once in 16 million runs.
    assert_ne!(pair.one.endpoint().send_psn(), psn);
    pair.exchange();
    pair.device.clear_failures();
    pair = pair.reconnect();
    assert_ne!(pair.one.number(), number);
    pair.exchange();
    pair.finish();
}

/// The port may come up again, and the device get room: the channel is not lost.
#[test]
fn a_reset_that_fails_gives_the_channel_back() {
    let faults = [
        (Verb::CreateQp, libc::EIO),
        (Verb::QueryPort, libc::ENODEV),
        (Verb::ModifyQp, libc::EIO),
        (Verb::PollCq, libc::EIO),
    ];
    for (verb, errno) in faults {
        let Pair { one, mut two, domain, device } = Pair::new();
        device.fail_always(verb, errno);
        let failed = one.reset().unwrap_err();
        let kind = failed.error.kind();
        assert_eq!(
            (failed.error.raw_os_error(), kind == ErrorKind::Resource),
            (Some(errno), false)
        );
        device.clear_failures();
        let mut one = failed.object;
        assert_eq!(one.send(()).unwrap_err(), TransportError::Stopped, "{verb:?}");
        let (again, other) = (one.reset().unwrap(), two.reset().unwrap());
        let (to_one, to_two) = (again.endpoint(), other.endpoint());
        one = again.handshake(to_two).unwrap();
        two = other.handshake(to_one).unwrap();
        let mut pair = Pair { one, two, domain, device };
        assert_eq!(pair.device.live_objects().queue_pairs, 2, "{verb:?}");
        pair.exchange();
        pair.finish();
    }
}

/// The destroy verb is called once. What the old queue pair may still need is leaked; the new one is
/// destroyed as usual.
#[test]
fn an_old_queue_pair_that_cannot_be_destroyed_is_an_error() {
    let Pair { one, two, domain, device } = Pair::new();
    device.fail_next(Verb::DestroyQp, libc::EIO);
    let failed = one.reset().unwrap_err();
    assert_eq!(failed.error.raw_os_error(), Some(libc::EIO));
    assert_eq!(
        device.live_objects().queue_pairs,
        3,
        "the leaked one, the new one, and the other's"
    );
    drop(failed);
    assert_eq!(device.live_objects().queue_pairs, 2);
    drop(two);
    assert_eq!(device.live_objects().queue_pairs, 1);
    drop(domain);
}

/// The handshake fails in each of its three steps: the channel keeps its address, and the next
/// attempt succeeds.
#[test]
fn a_handshake_that_fails_gives_the_channel_back() {
    for step in 0..3 {
        let device = Software::new();
        let domain = domain(&device);
        let (one, two) = (builder(&domain).build().unwrap(), builder(&domain).build().unwrap());
        let (to_one, to_two) = (one.endpoint(), two.endpoint());
        device.let_pass(Verb::ModifyQp, step);
        device.fail_next(Verb::ModifyQp, libc::ENETUNREACH);
        let failed = one.handshake(to_two).unwrap_err();
        assert_eq!(failed.error.raw_os_error(), Some(libc::ENETUNREACH));
        assert_eq!(failed.object.endpoint(), to_one, "the peer may have it already");
        let one = failed.object.handshake(to_two).unwrap();
        let mut pair = Pair { one, two: two.handshake(to_one).unwrap(), domain, device };
        pair.exchange();
        pair.finish();
    }
}

/// The queue pair cannot even go back to RESET at first: the next attempt does that too.
#[test]
fn a_handshake_can_fail_twice() {
    let device = Software::new();
    let domain = domain(&device);
    let (one, two) = (builder(&domain).build().unwrap(), builder(&domain).build().unwrap());
    let (to_one, to_two) = (one.endpoint(), two.endpoint());
    device.let_pass(Verb::ModifyQp, 1);
    device.fail_always(Verb::ModifyQp, libc::EAGAIN);
    let one = one.handshake(to_two).unwrap_err().object;
    let one = one.handshake(to_two).unwrap_err().object;
    device.clear_failures();
    let one = one.handshake(to_two).unwrap();
    let mut pair = Pair { one, two: two.handshake(to_one).unwrap(), domain, device };
    pair.exchange();
    pair.finish();
}

/// The reason of a failed change converts by `?` to what functions usually return.
#[test]
fn the_question_mark_keeps_the_reason() {
    use ibverbs::{Channel, Error, PreparedChannel};

    fn plain(channel: Channel<'static>) -> Result<PreparedChannel<'static>, Error> {
        Ok(channel.reset()?)
    }
    fn boxed(channel: Channel<'_>) -> Result<PreparedChannel<'_>, Box<dyn std::error::Error>> {
        Ok(channel.reset()?)
    }
    fn thread(
        channel: Channel<'_>,
    ) -> Result<PreparedChannel<'_>, Box<dyn std::error::Error + Send + Sync>> {
        Ok(channel.reset()?)
    }
    fn io(channel: Channel<'_>) -> std::io::Result<PreparedChannel<'_>> {
        Ok(channel.reset()?)
    }
    fn transport(channel: Channel<'_>) -> Result<PreparedChannel<'_>, TransportError> {
        Ok(channel.reset()?)
    }
    let failing = || {
        let Pair { one, device, .. } = Pair::new();
        device.fail_next(Verb::ModifyQp, libc::ENODEV);
        one
    };
    let expected = plain(failing()).unwrap_err();
    assert_eq!(expected.raw_os_error(), Some(libc::ENODEV));
    assert_eq!(boxed(failing()).unwrap_err().to_string(), expected.to_string());
    assert_eq!(thread(failing()).unwrap_err().to_string(), expected.to_string());
    assert_eq!(io(failing()).unwrap_err().to_string(), expected.to_string());
    assert_eq!(transport(failing()).unwrap_err(), TransportError::Verbs(expected));
    let failed = failing().reset().unwrap_err();
    assert_eq!(failed.to_string(), expected.to_string());
}
