//! Channels with flow control: a sender that knows how many receives its peer has posted.

mod agreement;
mod asynchronous;
mod ending;
#[path = "../../../tests/support/kept.rs"]
mod kept;
#[path = "../support/patience.rs"]
mod patience;
mod random;
#[path = "../support/side.rs"]
mod side;

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use ibverbs::channel::ChannelSet;
use ibverbs::{
    AccessFlags, Channel, ChannelBuilder, FetchAddWorkRequest, Inline, Loop, PooledBuffer,
    ReceiveWorkRequest, SharedMemoryRegion, TransportError, WriteWorkRequest,
    settings::{AckTimeout, MaxRnrRetries},
};
use ibverbs_software::{Device, Network};

use kept::Kept;
use patience::{PATIENCE, deadline};
use side::{Side, connect, handshake, simulated};

impl Side {
    /// Builds channels that do not survive a single message without a receive.
    fn builder(&self) -> ChannelBuilder<'static> {
        // However late a real device's thread runs. Simulated ones go on until they give up.
        let timeout = if self.device.address().is_loopback() { 20 } else { 8 };
        Channel::builder(&self.domain)
            .access(AccessFlags::empty())
            .flow_control(true)
            .max_rnr_retries(MaxRnrRetries::NONE)
            .ack_timeout(AckTimeout::new(timeout).unwrap())
            .settle_timeout(Duration::from_millis(10))
    }

    fn buffer(&self, number: u64) -> PooledBuffer {
        self.pool.take_from(&number.to_le_bytes()).unwrap().unwrap()
    }
}

/// Two sides whose devices have a network of their own.
fn sides() -> [Side; 2] {
    [(); 2].map(|()| Side::new(Device::new().unwrap()))
}

fn number(buffer: &PooledBuffer) -> u64 {
    u64::from_le_bytes(buffer[..].try_into().unwrap())
}

/// The number of the message that ends this receive.
fn received(channel: &mut Channel<'_>, mut receive: Kept<PooledBuffer>) -> u64 {
    number(&receive.wait(channel).unwrap().0)
}

/// Receives `count` messages with at most `ahead` receives posted, and loses time now and then.
fn receive_slowly(side: &Side, mut channel: Channel<'static>, count: u64, ahead: u64) {
    let mut posted = std::collections::VecDeque::new();
    for expected in 0..count {
        while posted.len() < ahead.min(count - expected) as usize {
            posted.push_back(kept::receive(&mut channel, side.buffer(0)).unwrap());
        }
        if expected % 16 == 0 {
            thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(received(&mut channel, posted.pop_front().unwrap()), expected);
    }
}

#[test]
fn a_sender_that_outruns_its_receiver_loses_nothing() {
    const COUNT: u64 = 500;
    for (ahead, sleep_after) in [(1, None), (4, None), (16, None), (4, Some(10))] {
        let sides = sides();
        let builder = sides[0].builder();
        let builder = match sleep_after {
            Some(polls) => builder.sleep_after(polls),
            None => builder,
        };
        let [mut one, other] = connect([builder, sides[1].builder()]);
        thread::scope(|threads| {
            threads.spawn(|| receive_slowly(&sides[1], other, COUNT, ahead));
            let mut region = sides[0].domain.allocate::<u64>(1).unwrap();
            for message in 0..COUNT {
                region[0] = message.to_le();
                one.until(deadline()).send(region.slice(..).unwrap()).unwrap();
            }
        });
    }
}

#[test]
fn a_window_of_sends_on_a_lossy_network_never_finds_the_receiver_unready() {
    let network = Network::builder().seed(3).loss(0.05).duplicate(0.05).reorder(0.1).build();
    let sides = simulated(&network);
    let [mut one, mut other] =
        connect([sides[0].builder().max_send_wr(3), sides[1].builder().max_recv_wr(5)]);
    let (mut sent, mut arrived) = (0, 0);
    let (mut sends, mut receives) = (Vec::new(), std::collections::VecDeque::new());
    while arrived < 300 {
        // The queue may be full, or credit lack. The reads have their own place in the queue.
        while sent < 300 {
            match kept::send(&mut one, sides[0].buffer(sent)) {
                Ok(send) => sends.push(send),
                Err(refused) => {
                    let expected = [TransportError::QueueFull, TransportError::NoCredit];
                    assert!(expected.contains(&refused), "{refused}");
                    break;
                }
            }
            sent += 1;
        }
        sends.retain_mut(|send| send.poll(&mut one).unwrap().is_none());
        // Nothing is sent now, and the answer to a read must be seen.
        if sends.is_empty() {
            one.poll().unwrap();
        }
        if receives.len() < 5 && arrived + (receives.len() as u64) < 300 {
            receives.push_back(kept::receive(&mut other, sides[1].buffer(0)).unwrap());
        }
        if let Some(first) = receives.front_mut()
            && let Some((buffer, _)) = first.poll(&mut other).unwrap()
        {
            assert_eq!(number(&buffer), arrived);
            receives.pop_front();
            arrived += 1;
        }
    }
    assert!(network.trace().lost() > 0);
}

/// How often a sender without credit asks, and when, is a matter of the network's time, however fast the host is.
#[test]
fn the_same_seed_gives_the_same_packets() {
    let conversation = |is_slow: bool| {
        let network = Network::builder().seed(11).loss(0.02).build();
        let sides = simulated(&network);
        let [mut one, mut other] = connect(sides.each_ref().map(Side::builder));
        let mut receive: Option<Kept<PooledBuffer>> = None;
        let (mut sends, mut sent, mut arrived) = (Vec::new(), 0, 0);
        for round in 0_u64.. {
            if arrived == 20 {
                break;
            }
            if is_slow && round % 8 == 0 {
                thread::sleep(Duration::from_millis(1));
            }
            if sent == arrived
                && let Ok(send) = kept::send(&mut one, sides[0].buffer(sent))
            {
                sends.push(send);
                sent += 1;
            }
            one.poll().unwrap();
            sends.retain_mut(|send| send.poll(&mut one).unwrap().is_none());
            if receive.is_none() && round % 50 == 49 {
                receive = Some(kept::receive(&mut other, sides[1].buffer(0)).unwrap());
            }
            if let Some(waiting) = &mut receive
                && let Some((buffer, _)) = waiting.poll(&mut other).unwrap()
            {
                assert_eq!(number(&buffer), arrived);
                arrived += 1;
                receive = None;
            }
        }
        network.trace().to_string()
    };
    let fast = conversation(false);
    assert!(fast.lines().count() > 100, "it asks again and again");
    assert!(fast == conversation(true));
}

#[test]
fn both_sides_send_to_each_other() {
    const COUNT: u64 = 300;
    let sides = sides();
    let channels = connect(sides.each_ref().map(|side| side.builder().max_recv_wr(4)));
    thread::scope(|threads| {
        for (side, mut channel) in sides.iter().zip(channels) {
            threads.spawn(move || {
                let mut posted = std::collections::VecDeque::new();
                let (mut sent, mut arrived) = (0, 0);
                let mut sends = Vec::new();
                while sent < COUNT || arrived < COUNT {
                    while posted.len() < 4 && arrived + (posted.len() as u64) < COUNT {
                        posted.push_back(kept::receive(&mut channel, side.buffer(0)).unwrap());
                    }
                    if sent < COUNT {
                        match kept::send(&mut channel, side.buffer(sent)) {
                            Ok(send) => {
                                sends.push(send);
                                sent += 1;
                            }
                            Err(refused) => assert!(
                                refused.is_queue_full() || refused == TransportError::NoCredit
                            ),
                        }
                    }
                    sends.retain_mut(|send| send.poll(&mut channel).unwrap().is_none());
                    if let Some(first) = posted.front_mut()
                        && let Some((buffer, _)) = first.poll(&mut channel).unwrap()
                    {
                        assert_eq!(number(&buffer), arrived);
                        posted.pop_front();
                        arrived += 1;
                    }
                }
                for mut send in sends {
                    send.wait(&mut channel).unwrap();
                }
                // The other side may still read this one's word: the channel stays until both are done.
                channel
            });
        }
    });
}

#[test]
fn what_uses_up_no_receive_needs_no_credit() {
    let sides = sides();
    let access = AccessFlags::REMOTE_READ | AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_ATOMIC;
    let region = SharedMemoryRegion::<u64>::new(&sides[1].domain, 1, access).unwrap();
    let builders = sides.each_ref().map(|side| side.builder().access(access));
    let [mut one, mut other] = connect(builders);
    let mut word = sides[0].domain.allocate::<u64>(1).unwrap();
    word[0] = 5;
    one.until(deadline()).write(word.slice(..).unwrap(), region.remote()).unwrap();
    one.run(FetchAddWorkRequest::new(&mut word.slice_mut(..).unwrap(), region.remote(), 2))
        .unwrap();
    one.read(&mut word.slice_mut(..).unwrap(), region.remote()).unwrap();
    assert_eq!((word[0], one.credits()), (7, Some(0)));
    one.keep_alive().unwrap();

    // A write with an immediate does.
    let soon = Instant::now() + Duration::from_millis(5);
    let told = one.until(soon).run(WriteWorkRequest::new(&(), region.remote()).immediate(9));
    assert_eq!(told.unwrap_err(), TransportError::NoCredit);
    let mut receive = kept::receive(&mut other, ()).unwrap();
    one.until(deadline()).run(WriteWorkRequest::new(&(), region.remote()).immediate(9)).unwrap();
    let (_, success) = receive.wait(&mut other).unwrap();
    assert_eq!(success.immediate(), Some(9));
}

#[test]
fn without_credit_nothing_is_posted_and_the_connection_lives() {
    let sides = sides();
    let [mut one, mut other] = connect(sides.each_ref().map(Side::builder));
    let mut region = sides[0].domain.allocate::<u64>(1).unwrap();
    region[0] = 7;
    let started = Instant::now();
    for wait in [0, 1, 20] {
        let soon = Instant::now() + Duration::from_millis(wait);
        let sent = one.until(soon).send(region.slice(..).unwrap());
        assert_eq!(sent.unwrap_err(), TransportError::NoCredit);
        assert_eq!(one.wait_for_credit_until(soon).unwrap_err(), TransportError::NoCredit);
    }
    assert!(started.elapsed() >= Duration::from_millis(21));
    assert_eq!(kept::send(&mut one, ()).err(), Some(TransportError::NoCredit));
    one.scope(|scope| {
        assert!(scope.can_post_send() && scope.credits() == Some(0));
        let refused = scope.post_send(Inline(&[])).unwrap_err();
        assert_eq!(refused, TransportError::NoCredit);
        let soon = Instant::now();
        assert_eq!(scope.wait_for_credit_until(soon).unwrap_err(), TransportError::NoCredit);
        Ok::<_, TransportError>(())
    })
    .unwrap();
    // A handle ends the wait.
    one.cancel_handle().unwrap().cancel();
    assert_eq!(one.wait_for_credit().unwrap_err(), TransportError::Cancelled);
    // Nothing was posted: the channel goes on.
    one.cancel_handle().unwrap().cancel();
    assert_eq!(one.send(region.slice(..).unwrap()).unwrap_err(), TransportError::Cancelled);

    let receive = kept::receive(&mut other, sides[1].buffer(0)).unwrap();
    one.wait_for_credit_until(deadline()).unwrap();
    assert_eq!(one.credits(), Some(1));
    one.scope(|scope| scope.post_send(region.slice(..).unwrap())?.wait().map(drop)).unwrap();
    assert_eq!((received(&mut other, receive), one.credits()), (7, Some(0)));
}

#[test]
fn receives_that_were_posted_before_the_handshake_are_credits() {
    let sides = sides();
    let one = sides[0].builder().build().unwrap();
    let mut other = Loop::<PooledBuffer>::new(&sides[1].context, 64).unwrap();
    let builder = other.create_channel(&sides[1].domain).flow_control(true);
    let peer = other.add_prepared(builder.build().unwrap()).unwrap();
    for token in 0..3 {
        other.post(peer, ReceiveWorkRequest::new(sides[1].buffer(0)), token).unwrap();
    }
    other.handshake(peer, one.endpoint()).unwrap();
    let mut one = one.handshake(other.endpoint(peer).unwrap()).unwrap();
    one.wait_for_credit_until(deadline()).unwrap();
    assert_eq!(one.credits(), Some(3));
    for message in 0..3 {
        one.until(deadline()).send(sides[0].buffer(message)).unwrap();
    }
    assert_eq!(kept::send(&mut one, ()).err(), Some(TransportError::NoCredit));
    for expected in 0..3 {
        let ended = other.wait_ended_until(deadline()).unwrap().expect("a message");
        assert_eq!((ended.token, number(&ended.buffer)), (expected, expected));
    }
}

#[test]
fn a_broadcast_waits_for_each_peer_and_leaves_those_that_have_no_receive() {
    let sides = sides();
    let mut pairs = Vec::new();
    let mut set = ChannelSet::new((0..3).map(|_| {
        let [one, other] = connect(sides.each_ref().map(Side::builder));
        pairs.push(other);
        one
    }));
    let mut region = sides[0].domain.allocate::<u64>(1).unwrap();
    region[0] = 4;
    let receives = [0, 2].map(|peer| kept::receive(&mut pairs[peer], sides[1].buffer(0)).unwrap());
    for peer in [0, 2] {
        set.channels()[peer].wait_for_credit_until(deadline()).unwrap();
    }
    let message = region.slice(..).unwrap();
    let results = set.broadcast(message, Instant::now() + Duration::from_secs(5));
    assert!(results[0].is_ok() && results[2].is_ok(), "{results:?}");
    assert_eq!(*results[1].as_ref().unwrap_err(), TransportError::NoCredit);
    for (receive, peer) in receives.into_iter().zip([0, 2]) {
        assert_eq!(received(&mut pairs[peer], receive), 4);
    }
    // The one without is as good as the others.
    let receives: Vec<_> =
        pairs.iter_mut().map(|other| kept::receive(other, sides[1].buffer(0)).unwrap()).collect();
    let message = region.slice(..).unwrap();
    assert!(set.broadcast(message, deadline()).iter().all(Result::is_ok));
    for (receive, other) in receives.into_iter().zip(&mut pairs) {
        assert_eq!(received(other, receive), 4);
    }
}
