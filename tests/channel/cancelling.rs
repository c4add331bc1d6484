//! Waits that another thread ends.

use std::thread;
use std::time::{Duration, Instant};

use crate::pair::{Pair, outstanding};
use crate::software::Software;
use ibverbs::channel::CancelHandle;
use ibverbs::{
    AccessFlags, BufferPool, Channel, Inline, ReceiveWorkRequest, SendWorkRequest, TransportError,
};

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
    // SAFETY: there is no memory.
    |channel| cancelled(unsafe { channel.receive_unpolled(()) }.unwrap().wait(channel)),
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
fn waits_of_owned_operations_leave_everything_in_flight() {
    for sleep_after in [None, Some(0)] {
        let mut pair = pair(sleep_after);
        let pool = BufferPool::new(&pair.domain, 16, 2, AccessFlags::empty()).unwrap();
        let handle = pair.one.cancel_handle().unwrap();
        let mut receive =
            pair.one.post_owned(ReceiveWorkRequest::new(pool.take().unwrap())).unwrap();
        let mut other = pair.one.post_owned(ReceiveWorkRequest::new(pool.take().unwrap())).unwrap();
        for kind in 0..2 {
            let (late, limit) = (cancel_late(&handle), Instant::now() + LONG);
            let error = match kind {
                0 => cancelled(receive.wait(&mut pair.one)),
                _ => cancelled(receive.wait_until(&mut pair.one, limit)),
            };
            assert_eq!(error, TransportError::Cancelled);
            late.join().unwrap();
            assert_eq!(outstanding(&pair.device, &pair.one), (0, 2));
            assert_eq!(pool.available(), 0);
        }
        // Both messages arrive as if nothing had been.
        pair.two.send(Inline(b"one")).unwrap();
        pair.two.send(Inline(b"two")).unwrap();
        assert_eq!(&receive.wait(&mut pair.one).unwrap().0[..3], b"one");
        assert_eq!(&other.wait(&mut pair.one).unwrap().0[..3], b"two");
        drop((receive, other, pool));
        pair.exchange();
        pair.finish();
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

/// A message and a cancellation at the same time: neither is lost.
#[test]
fn neither_a_message_nor_a_cancellation_is_lost() {
    let mut pair = pair(Some(0));
    let pool = BufferPool::new(&pair.domain, 16, 1, AccessFlags::empty()).unwrap();
    let handle = pair.one.cancel_handle().unwrap();
    let (one, two) = (&mut pair.one, &mut pair.two);
    for round in 0..200_u8 {
        let mut receive = one.post_owned(ReceiveWorkRequest::new(pool.take().unwrap())).unwrap();
        thread::scope(|threads| {
            threads.spawn(|| handle.cancel());
            threads.spawn(|| two.send(Inline(&[round])).unwrap());
            let mut cancellations = 0;
            let buffer = loop {
                match receive.wait(one) {
                    Ok((buffer, _)) => break buffer,
                    Err(error) => assert_eq!(error.error, TransportError::Cancelled),
                }
                cancellations += 1;
            };
            assert!(cancellations <= 1 && buffer[0] == round);
        });
        handle.clear();
    }
    drop(pool);
    pair.finish();
}
