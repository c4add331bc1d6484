//! A device is removed while a thread sleeps, or an event loop waits: each learns of it, on a device with a thread and on a
//! simulated network. (A channel whose receive has a borrowed buffer aborts the process then, as documented.)

#[path = "support/patience.rs"]
mod patience;

use std::os::fd::{AsFd as _, AsRawFd as _};
use std::sync::Arc;
use std::sync::mpsc::{self, Sender};
use std::thread;
use std::time::{Duration, Instant};

use ibverbs::{
    CompletionQueue, Context, Error, ErrorKind, Loop, PooledBuffer, TransportError, WorkCompletion,
};
use ibverbs_software::{Device, Network};

use patience::deadline;

/// Calls `sleep` with a device that is removed soon after it has said that it begins to.
fn each_device(sleep: impl Fn(Arc<Context<'static>>, Sender<()>) -> Error) {
    let network = Network::builder().seed(1).build();
    for device in [Device::new().unwrap(), network.device().unwrap()] {
        let context = Arc::new(device.open().unwrap());
        let ((begins, has_begun), device) = (mpsc::channel(), &device);
        let error = thread::scope(|threads| {
            threads.spawn(move || {
                has_begun.recv().expect("it begins to sleep");
                thread::sleep(Duration::from_millis(20));
                device.remove();
            });
            sleep(context, begins)
        });
        assert_eq!(error.raw_os_error(), Some(libc::EIO), "{error}");
        assert_ne!(error.kind(), ErrorKind::TimedOut);
    }
}

fn verbs(error: TransportError) -> Error {
    let TransportError::Verbs(error) = error else { panic!("{error}") };
    error
}

#[test]
fn who_waits_for_a_completion_queue_learns_of_it() {
    each_device(|context, begins| {
        let queue = CompletionQueue::builder(&context, 8).own_channel().build().unwrap();
        let mut room = [WorkCompletion::default()];
        begins.send(()).unwrap();
        queue.wait_until(&mut room, deadline()).unwrap_err()
    });
}

#[test]
fn who_waits_for_a_loop_learns_of_it() {
    each_device(|context, begins| {
        let mut server = Loop::<PooledBuffer>::new(&context, 16).unwrap();
        begins.send(()).unwrap();
        verbs(server.wait_ended_until(deadline()).map(|ended| ended.is_some()).unwrap_err())
    });
    each_device(|context, begins| {
        let server = Loop::<PooledBuffer>::new(&context, 16).unwrap();
        let waiter = server.waiter();
        let armed = waiter.arm().unwrap();
        begins.send(()).unwrap();
        armed.wait_until(deadline()).unwrap_err()
    });
}

#[test]
fn an_event_loop_learns_of_it() {
    each_device(|context, begins| {
        let mut server = Loop::<PooledBuffer>::new(&context, 16).unwrap();
        let end = deadline();
        begins.send(()).unwrap();
        loop {
            if let Err(error) = server.arm() {
                return error;
            }
            match server.next_ended() {
                Ok(ended) => assert!(ended.is_none()),
                Err(error) => return verbs(error),
            }
            assert!(Instant::now() < end, "it is told nothing");
            let fd = server.as_fd().as_raw_fd();
            let mut file = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
            // SAFETY: one live structure.
            unsafe { libc::poll(&mut file, 1, 100) };
        }
    });
}
