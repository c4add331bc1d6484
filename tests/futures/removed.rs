//! The device is pulled out: no completion comes any more, and whoever runs the reactor learns that from its file.

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::task::{Context, Poll};

use ibverbs::future::Locked;
use ibverbs::{Error, ErrorKind, PooledBuffer, Reactor, SharedMemoryRegion, TransportError};
use ibverbs_function_device::Kind;

use crate::rig::{ALL, CHUNKS, Count, LEN, Rig, poll, poll_in};

/// Whether the reactor's file is readable.
fn poll_readable(reactor: &Reactor) -> Poll<io::Result<()>> {
    let mut file = libc::pollfd { fd: reactor.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: there is one entry, which is writable.
    match unsafe { libc::poll(&mut file, 1, 0) } {
        0 => Poll::Pending,
        1 => Poll::Ready(Ok(())),
        _ => Poll::Ready(Err(io::Error::last_os_error())),
    }
}

#[test]
fn a_reactor_has_one_file() {
    let rig = Rig::<Locked<PooledBuffer>>::new();
    assert_eq!(rig.reactor.as_raw_fd(), rig.reactor.as_fd().as_raw_fd());
    rig.finish();
}

fn assert_gone(error: Error) {
    assert_eq!(
        (error.kind(), error.raw_os_error()),
        (ErrorKind::Driver, Some(libc::EIO)),
        "{error}"
    );
}

/// Whether the reactor sleeps at that time or works, and whether the queue pairs can be destroyed or not.
#[test]
fn every_future_ends_when_the_device_is_pulled_out() {
    for asleep in [true, false] {
        for leaked in [false, true] {
            let rig = Rig::<Locked<PooledBuffer>>::new();
            let device = rig.device.clone();
            let count = Arc::new(Count::default());
            let target = SharedMemoryRegion::<u8>::new(&rig.domain, LEN, ALL).unwrap();
            // Four are in flight, and one waits for room.
            let mut operations = [(); 5].map(|()| rig.one.write(rig.buffer(1), target.remote()));
            let mut receive = rig.two.receive(rig.buffer(2));
            let mut shutdown = Box::pin(rig.one.shutdown());
            for operation in &mut operations {
                assert!(poll_in(operation, &count).is_none());
            }
            assert!(poll_in(&mut receive, &count).is_none());
            {
                let readable = |_: &mut Context<'_>| poll_readable(&rig.reactor);
                let mut run = Box::pin(rig.reactor.run(readable));
                if asleep {
                    assert!(poll(&mut run).is_none());
                    assert!(poll(&mut run).is_none(), "it sleeps until the file is readable");
                }
                assert!(poll_in(&mut shutdown, &count).is_none());
                let woken = count.get();
                if leaked {
                    device.fail("destroy_qp").errno(libc::EIO).always();
                }
                device.remove();
                // A reactor that was asleep first finds nothing to do. Each time, it asks to be polled again.
                let ended = (0..3).find_map(|_| poll(&mut run)).expect("it has ended");
                assert_gone(ended.unwrap_err());
                assert!(count.get() >= woken + 6, "{} of all tasks are woken", count.get() - woken);
            }
            poll(&mut shutdown).expect("it has ended");
            for (n, operation) in operations.iter_mut().enumerate() {
                let ended = poll(operation).expect("it has ended").unwrap_err();
                let was_posted = n < 4;
                // The device may use it until the queue pair is destroyed.
                assert_eq!(ended.buffer.is_none(), was_posted, "{ended}");
                assert!(ended.buffer.is_none_or(|buffer| buffer[..] == [1; LEN]));
            }
            let ended = poll(&mut receive).expect("it has ended").unwrap_err();
            assert!(ended.buffer.is_none(), "{ended}");
            // A receive or send that comes later ends at once.
            let late = poll(&mut rig.two.send(rig.buffer(3))).expect("it has ended").unwrap_err();
            let TransportError::Verbs(error) = late.error else { panic!("{late}") };
            assert_gone(error);
            assert_eq!(late.buffer.expect("it was not posted")[..], [3; LEN]);
            drop((operations, receive, shutdown, ended));
            assert_eq!(rig.pool.available(), CHUNKS - 5);
            let Rig { one, two, reactor, pool, domain, .. } = rig;
            drop((one, two));
            assert_eq!(pool.available(), if leaked { CHUNKS - 5 } else { CHUNKS });
            drop((reactor, pool, domain, target));
            assert_eq!((device.live(Kind::QueuePair), device.calls("destroy_qp")), {
                (if leaked { 2 } else { 0 }, 2)
            });
            assert_eq!(device.violations().0, 0, "{}", device.violations().1);
        }
    }
}
