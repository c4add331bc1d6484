//! Packets of the peer of an earlier connection do not reach the next one, on Soft-RoCE. To be
//! run by `script/test rxe`, in the machine that `script/vm` starts.

#[path = "support/vm/mod.rs"]
mod vm;

use std::thread;
use std::time::{Duration, Instant};

use ibverbs::{
    Inline, ReceiveWorkRequest, TransportError, completion::WorkErrorClass, settings::AckTimeout,
};

use vm::channels::{connect, deadline, handshake, nothing_is_left, sides};
use vm::{one_at_a_time, run};

/// A message of the old connection, and the first of the new one.
const STALE: u64 = 0xdead;
const FRESH: u64 = 1000;
const MESSAGES: u64 = 20;

/// `b` is connected to `old`, is reset, and shakes hands with `new` while a send of `old` is still being
/// repeated. The old peer does not know that anything has changed, so no waiting on `b`'s side helps.
#[test]
fn a_message_of_the_old_peer_is_not_received() {
    let _lock = one_at_a_time();
    let sides = sides();
    let (b, mut old) = connect(sides.0.builder(), sides.1.builder());
    let new = sides.1.builder().build().unwrap();
    let (mut stale, mut fresh, mut inbox) =
        (sides.1.region(1), sides.1.region(1), sides.0.region(1));
    stale[0] = STALE;
    thread::scope(|threads| {
        let prepared = b.reset().unwrap();
        let repeating = threads.spawn(move || old.until(deadline()).send(stale.slice(..).unwrap()));
        thread::sleep(Duration::from_secs(1));
        let (mut b, mut new) = handshake(prepared, new);
        threads.spawn(move || {
            // The old peer repeats its message about twice a second. Wait until it has done so first.
            thread::sleep(Duration::from_secs(2));
            for number in FRESH..FRESH + MESSAGES {
                fresh[0] = number;
                new.until(deadline()).send(fresh.slice(..).unwrap()).unwrap();
                thread::sleep(Duration::from_millis(100));
            }
        });
        for number in FRESH..FRESH + MESSAGES {
            b.until(deadline()).receive(inbox.slice_mut(..).unwrap()).unwrap();
            assert_eq!(inbox[0], number, "a message of another connection");
        }
        match repeating.join().unwrap() {
            Err(TransportError::Work(error)) => {
                assert_eq!(error.class(), WorkErrorClass::Transport, "{error}");
            }
            result => panic!("the message that nobody took: {result:?}"),
        }
    });
    drop(inbox);
    nothing_is_left(sides);
}

/// How long the wire holds each packet in the test below.
const DELAY: Duration = Duration::from_millis(400);

/// A wire with a delay, until dropped.
struct SlowWire;

impl SlowWire {
    fn new() -> Self {
        let millis = DELAY.as_millis();
        run(&format!("tc qdisc add dev veth1 root netem delay {millis}ms"));
        Self
    }
}

impl Drop for SlowWire {
    fn drop(&mut self) {
        run("tc qdisc del dev veth1 root");
    }
}

/// The old peer acknowledges what `b` sent to it, but the wire holds the acknowledgement until `b` is
/// connected to the new peer and has sent something there, for which that has no room. If the late packet
/// is for the same queue pair, Soft-RoCE takes it for an acknowledgement of the new message whenever its
/// number is higher, which is a matter of luck with random numbers: hence the rounds.
#[test]
fn a_late_acknowledgement_of_the_old_peer_completes_nothing() {
    let _lock = one_at_a_time();
    let sides = sides();
    let _slow = SlowWire::new();
    let builder = |side: usize| {
        let side = if side == 0 { &sides.0 } else { &sides.1 };
        // Long enough that nothing is sent again because of the delay.
        side.builder().ack_timeout(AckTimeout::new(20).unwrap())
    };
    for round in 0..5 {
        let (mut b, mut old) = connect(builder(0), builder(1));
        let number = b.number();
        // SAFETY: there is no memory.
        let _receive = unsafe { old.post_unpolled(ReceiveWorkRequest::new(())) }.unwrap();
        // The message itself arrives at once; its acknowledgement takes its time.
        let late = b.until(Instant::now() + DELAY / 4).send(Inline(b"")).unwrap_err();
        assert_eq!(late, TransportError::TimedOut);
        let (mut b, new) = handshake(b.reset().unwrap(), builder(1).build().unwrap());
        assert_ne!(b.number(), number);
        // The new peer has no receive, so nothing can complete this.
        let result = b.until(Instant::now() + 2 * DELAY).send(Inline(b""));
        assert_eq!(result.unwrap_err(), TransportError::TimedOut, "round {round}");
        drop((b, old, new));
    }
    nothing_is_left(sides);
}
