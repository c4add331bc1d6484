//! A device that is pulled out: every future ends, whoever drives the reactor.

use std::future::Future;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use ibverbs::TransportError;
use ibverbs_software::Device;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::runtime::Runtime;

use crate::sides::{Side, connect, current_thread, multi_thread};

fn poll<F: Future + Unpin>(future: &mut F) -> Option<F::Output> {
    match Pin::new(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(output) => Some(output),
        Poll::Pending => None,
    }
}

#[track_caller]
fn is_gone(error: TransportError) {
    let TransportError::Verbs(error) = error else { panic!("{error}") };
    assert_eq!(error.raw_os_error(), Some(libc::EIO));
}

fn on_tokio(runtime: &Runtime, spin: u32) {
    let devices = [(); 2].map(|()| Device::new().unwrap());
    let [one, other] = devices.each_ref().map(|device| Side::spinning(device, spin));
    let task = one.run(runtime);
    let [ours, _theirs] = connect(&one, &other);
    let mut receive = ours.receive(one.buffer(1));
    runtime.block_on(async {
        // Whether the reactor sleeps by then or not.
        assert!(poll(&mut receive).is_none());
        tokio::task::yield_now().await;
        devices[0].remove();
        let ended = tokio::time::timeout(Duration::from_secs(120), receive).await.expect("it ends");
        is_gone(ended.unwrap_err().error);
        assert_eq!(task.await.unwrap().unwrap_err().raw_os_error(), Some(libc::EIO));
    });
}

#[test]
fn a_reactor_on_tokio_ends_when_its_device_is_pulled_out() {
    for runtime in [current_thread(), multi_thread()] {
        on_tokio(&runtime, 0);
        // This reactor does not sleep.
        on_tokio(&runtime, u32::MAX);
    }
}

/// The kernel reports an error of the file then, and nothing else.
#[test]
fn tokio_tells_of_a_file_that_has_an_error_only() {
    let (reader, writer) = std::io::pipe().unwrap();
    current_thread().block_on(async {
        let interest = Interest::READABLE | Interest::ERROR;
        // Its successor is newer than tokio's line of long support.
        #[allow(deprecated)]
        let file = AsyncFd::with_interest(OwnedFd::from(writer), interest).unwrap();
        drop(reader);
        let ready = tokio::time::timeout(Duration::from_secs(120), file.ready(interest)).await;
        assert!(ready.expect("it is ready").unwrap().ready().is_error());
    });
}

#[test]
fn a_loop_that_only_turns_ends_when_its_device_is_pulled_out() {
    let devices = [(); 2].map(|()| Device::new().unwrap());
    let [one, other] = devices.each_ref().map(|device| Side::spinning(device, 0));
    let [ours, _theirs] = connect(&one, &other);
    let mut receive = ours.receive(one.buffer(1));
    assert!(poll(&mut receive).is_none());
    devices[0].remove();
    let error = loop {
        match one.reactor.turn() {
            Ok(turned) => assert_eq!(turned, 0),
            Err(error) => break error,
        }
    };
    assert_eq!(error.raw_os_error(), Some(libc::EIO));
    one.reactor.stop(TransportError::Verbs(error));
    is_gone(poll(&mut receive).expect("it has ended").unwrap_err().error);
}
