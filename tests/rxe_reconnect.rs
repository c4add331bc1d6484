//! What the peer of an earlier connection still sends does not reach the next one, on Soft-RoCE. To be
//! run by `script/test rxe`, in the machine that `script/vm` starts.

#[path = "support/vm/mod.rs"]
mod vm;

use std::thread;
use std::time::{Duration, Instant};

use ibverbs::{TransportError, WorkErrorClass};

use vm::channels::{connect, deadline, handshake, nothing_is_left, sides};
use vm::one_at_a_time;

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
        let repeating =
            threads.spawn(move || old.send_deadline(&stale.slice(..).unwrap(), deadline()));
        thread::sleep(Duration::from_secs(1));
        let (mut b, mut new) = handshake(prepared, new);
        threads.spawn(move || {
            // The old peer repeats its message about twice a second: let it be the first.
            thread::sleep(Duration::from_secs(2));
            for number in FRESH..FRESH + MESSAGES {
                fresh[0] = number;
                new.send_deadline(&fresh.slice(..).unwrap(), deadline()).unwrap();
                thread::sleep(Duration::from_millis(100));
            }
        });
        for number in FRESH..FRESH + MESSAGES {
            let limit = Instant::now() + Duration::from_secs(10);
            b.receive_deadline(&mut inbox.slice_mut(..).unwrap(), limit).unwrap();
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
