//! Waits that another thread ends.

use std::thread;
use std::time::{Duration, Instant};

use crate::pair::{Pair, outstanding, soon};
use crate::software::Software;
use ibverbs::channel::CancelHandle;
use ibverbs::{Channel, Inline, ReceiveWorkRequest, SendWorkRequest, TransportError};

/// A wait for something that never comes, which returns its error.
type WaitFor = fn(&mut Channel<'static>) -> TransportError;

fn cancelled<T>(result: Result<T, impl Into<TransportError>>) -> TransportError {
    result.err().expect("nothing comes").into()
}

/// Each kind of wait that borrows memory.
const STOPPING: [WaitFor; 6] = [
    |channel| cancelled(channel.receive(())),
    |channel| cancelled(channel.until(Instant::now() + LONG).receive(())),
    |channel| cancelled(channel.scope(|scope| scope.post_receive(())?.wait())),
    |channel| cancelled(channel.scope(|scope| scope.post_receive(())?.spin_poll())),
    |channel| cancelled(channel.scope(|scope| scope.post_receive(()).map(drop))),
    |channel| {
        // SAFETY: there is no memory.
        let work = unsafe { channel.post_unpolled(ReceiveWorkRequest::new(())) };
        cancelled(work.unwrap().wait(channel))
    },
];

/// Longer than any test takes.
const LONG: Duration = Duration::from_secs(300);

fn pair(sleep_after: Option<u32>) -> Pair {
    Pair::with(Software::on_sockets(), |builder| match sleep_after {
        Some(polls) => builder.sleep_after(polls),
        None => builder,
    })
}

/// Cancels once the other thread has been waiting for a while.
fn cancel_late(handle: &CancelHandle) -> thread::JoinHandle<()> {
    let handle = handle.clone();
    thread::spawn(move || {
        thread::sleep(Duration::from_millis(20));
        handle.cancel();
    })
}

#[test]
fn every_wait_that_borrows_ends_and_stops_the_channel() {
    for sleep_after in [None, Some(0), Some(200)] {
        for wait_for in STOPPING {
            let mut pair = pair(sleep_after);
            let handle = pair.one.cancel_handle().unwrap();
            let late = cancel_late(&handle);
            assert_eq!(wait_for(&mut pair.one), TransportError::Cancelled);
            late.join().unwrap();
            assert!(!handle.is_pending(), "one call, one wait");
            assert_eq!(outstanding(&pair.device, &pair.one), (0, 0));
            assert_eq!(pair.one.send(()).unwrap_err(), TransportError::Stopped);
            let mut pair = pair.reconnect();
            pair.exchange();
            // The handle is that of the channel, also with another queue pair.
            handle.cancel();
            assert_eq!(wait_for(&mut pair.one), TransportError::Cancelled);
            pair.finish();
            handle.cancel();
            assert!(handle.is_pending(), "nobody waits any more");
        }
    }
}

#[test]
fn what_has_ended_is_not_cancelled() {
    let mut pair = pair(Some(0));
    let handle = pair.one.cancel_handle().unwrap();
    handle.cancel();
    pair.one
        .scope(|scope| {
            let receive = scope.post_receive(())?;
            pair.two.run(SendWorkRequest::new(&()).immediate(5))?;
            assert_eq!(receive.wait()?.1.immediate(), Some(5));
            Ok::<_, TransportError>(())
        })
        .unwrap();
    assert!(handle.is_pending() && handle.clear() && !handle.clear());
    pair.exchange();
    pair.finish();
}

/// A message and a cancellation at the same time: the wait tells of the one, and the other is left for the next wait, or
/// ends with the channel.
#[test]
fn neither_a_message_nor_a_cancellation_is_lost() {
    let mut pair = pair(Some(0));
    let handle = pair.one.cancel_handle().unwrap();
    for round in 0..100_u8 {
        let mut region = pair.region(1, !round);
        let (one, two) = (&mut pair.one, &mut pair.two);
        let received = thread::scope(|threads| {
            threads.spawn(|| handle.cancel());
            // Nothing receives it once the channel is stopped.
            threads.spawn(|| two.until(soon()).send(Inline(&[round])).is_ok());
            one.receive(region.slice_mut(..).unwrap())
        });
        match received {
            Ok(success) => {
                assert_eq!((success.byte_len(), region[0]), (1, round));
                assert!(handle.is_pending() && handle.clear(), "it was not reported");
            }
            Err(error) => {
                assert_eq!(error, TransportError::Cancelled);
                assert!(!handle.is_pending(), "it was reported");
                pair = pair.reconnect();
            }
        }
    }
    let mut pair = pair.reconnect();
    pair.exchange();
    pair.finish();
}
