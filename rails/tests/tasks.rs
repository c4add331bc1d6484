//! Rails in an asynchronous program: on tokio, on devices of software in real time.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use ibverbs::AccessFlags;
use ibverbs_rails::{
    AsyncRails, ControlStream, Event, PeerId, Rails, RailsError, RemoteRailMemory, Transfer,
};
use ibverbs_software::{Device, Network};
use tokio::net::{TcpListener, TcpStream};

/// Devices of a side.
fn rails(network: &Network, side: u8, count: u8) -> (Rails, Vec<Device>) {
    let device = |rail: u8| {
        let address = format!("10.0.{rail}.{side}").parse().unwrap();
        let builder = Device::builder().network(network).address(address);
        // No two devices of a process have the same name.
        let name = format!("tasks{}-{rail}-{side}", std::thread::current().name().unwrap().len());
        let device = builder.name(name).build().unwrap();
        device.register();
        device
    };
    let devices: Vec<_> = (0..count).map(device).collect();
    let builder = devices.iter().fold(Rails::builder(), |rails, it| rails.device(it.name()));
    (builder.build().unwrap(), devices)
}

/// Runs both sides in tasks of one thread.
fn run<F: Future<Output = ()>>(test: impl FnOnce([(AsyncRails, PeerId); 2]) -> F) {
    run_over(2, test);
}

fn run_over<F: Future<Output = ()>>(
    rails_of_each: u8,
    test: impl FnOnce([(AsyncRails, PeerId); 2]) -> F,
) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let network = Network::builder().trace_bytes(0).build();
    let _background = network.drive_in_background().unwrap();
    let [(one, _one), (two, _two)] = [1, 2].map(|side| rails(&network, side, rails_of_each));
    runtime.block_on(async {
        let [(one, one_driver), (two, two_driver)] = [one, two].map(AsyncRails::new);
        let drivers = [one_driver, two_driver].map(|driver| tokio::spawn(driver.run_on_tokio()));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (other, _) = listener.accept().await.unwrap();
        let [stream, other] = [stream, other].map(|stream| stream.into_std().unwrap());
        let (peer, other) = tokio::join!(one.connect_over(stream), two.accept_over(other));
        test([(one, peer.unwrap()), (two, other.unwrap())]).await;
        // Without a handle, the drivers end.
        for driver in drivers {
            driver.await.unwrap().unwrap();
        }
    });
}

#[test]
fn transfers_notifications_and_messages_are_awaited() {
    run(everything);
}

#[test]
fn with_one_device_too() {
    run_over(1, everything);
}

async fn everything([(one, peer), (two, other)]: [(AsyncRails, PeerId); 2]) {
    let access = AccessFlags::REMOTE_READ | AccessFlags::REMOTE_WRITE;
    let allocate = move |rails: &Rails| rails.allocate(4 << 20, access).unwrap();
    let [ours, theirs] = [one.with(allocate).await.unwrap(), two.with(allocate).await.unwrap()];
    ours.write(0, &[7; 4 << 20]).unwrap();
    // The second side tells its memory by a message.
    let remote = theirs.remote().to_bytes();
    let (sent, got) = tokio::join!(two.send(other, remote), one.receive(peer));
    sent.unwrap();
    let remote = RemoteRailMemory::from_bytes(&got.unwrap()).unwrap();
    let write = Transfer::write(ours.slice(..).unwrap(), remote).notify(3);
    let notified = async {
        loop {
            if let Event::Notified { tag, .. } = two.next_event().await.unwrap() {
                return tag;
            }
        }
    };
    let (written, tag) = tokio::join!(one.transfer(peer, write), notified);
    written.unwrap();
    assert_eq!(tag, 3);
    let mut bytes = vec![0; 4 << 20];
    theirs.read(0, &mut bytes).unwrap();
    assert!(bytes.iter().all(|&byte| byte == 7));
    // Many at a time, each to its own task.
    let tasks = (0..50_u8).map(|number| {
        let one = one.clone();
        tokio::spawn(async move { one.send(peer, [number]).await })
    });
    let tasks: Vec<_> = tasks.collect();
    for number in 0..50_u8 {
        assert_eq!(two.receive(other).await.unwrap(), [number]);
    }
    for task in tasks {
        task.await.unwrap().unwrap();
    }
}

/// Whoever panics in a closure for the rails panics alone.
#[test]
fn a_panic_in_a_call_ends_no_other_task() {
    struct PanicsInDrop;
    impl Drop for PanicsInDrop {
        fn drop(&mut self) {
            panic!("as it is dropped");
        }
    }
    run(|[(one, peer), (two, other)]| async move {
        let clone = one.clone();
        let task = tokio::spawn(async move { clone.with(|_| panic!("in the call")).await });
        let panicked = task.await.unwrap_err().into_panic();
        assert_eq!(panicked.downcast_ref::<&str>(), Some(&"in the call"));
        // The task waits neither for the answer, nor for what the panic has left.
        for panics in [true, false] {
            let call = move |_: &Rails| {
                if panics {
                    std::panic::panic_any(PanicsInDrop);
                }
                PanicsInDrop
            };
            let mut forgotten = Box::pin(one.with(call));
            assert!(forgotten.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        }
        one.send(peer, [1]).await.unwrap();
        assert_eq!(two.receive(other).await.unwrap(), [1]);
    });
}

#[test]
fn a_dropped_future_leaves_nothing_behind() {
    struct Counts;
    impl Wake for Counts {
        fn wake(self: Arc<Self>) {}
    }
    run(|[(one, peer), _]| async move {
        let counts = Arc::new(Counts);
        let mut others = Vec::new();
        for number in 0..10_000 {
            // A waker for each.
            let waker = Waker::from(counts.clone());
            let mut cx = Context::from_waker(&waker);
            if number % 2 == 0 {
                let mut future = Box::pin(one.receive(peer));
                assert!(future.as_mut().poll(&mut cx).is_pending());
                assert!(future.as_mut().poll(&mut cx).is_pending());
                if number % 1000 == 0 {
                    others.push(future);
                }
            } else {
                let mut future = Box::pin(one.next_event());
                // Events of the connection may still be there.
                let _ = future.as_mut().poll(&mut cx);
            }
        }
        assert_eq!(Arc::strong_count(&counts), 1 + others.len());
        drop(others);
        assert_eq!(Arc::strong_count(&counts), 1);
    });
}

/// A peer whose waiting task was dropped is removed.
#[test]
fn a_connection_that_is_dropped_ends() {
    run(|[(one, _), _]| async move {
        let (stream, mut far) = std::os::unix::net::UnixStream::pair().unwrap();
        stream.set_nonblocking(true).unwrap();
        let mut future = Box::pin(one.accept_over(Unix(stream)));
        assert!(future.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        drop(future);
        one.with(|_| ()).await.unwrap();
        // The stream is closed by the driver.
        far.set_nonblocking(false).unwrap();
        assert_eq!(far.read(&mut [0]).unwrap(), 0);
    });
}

/// The connection ends also if its result is there, and the task was dropped before it has seen that.
#[test]
fn a_connection_whose_result_nobody_takes_ends() {
    run(|[(one, _), (two, _)]| async move {
        let (stream, far) = std::os::unix::net::UnixStream::pair().unwrap();
        [&stream, &far].into_iter().for_each(|stream| stream.set_nonblocking(true).unwrap());
        let mut future = Box::pin(one.connect_over(Unix(stream)));
        assert!(future.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        let peer = two.accept_over(Unix(far)).await.unwrap();
        // The other side is connected, and this one was when it answers.
        two.send(peer, [1]).await.unwrap();
        one.with(|_| ()).await.unwrap();
        drop(future);
        let error = two.receive(peer).await.unwrap_err();
        assert!(matches!(error, RailsError::UnknownPeer), "{error}");
    });
}

struct Unix(std::os::unix::net::UnixStream);

impl Read for Unix {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        self.0.read(to)
    }
}

impl Write for Unix {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl ControlStream for Unix {
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.0.as_fd())
    }
}

#[test]
fn a_future_that_is_dropped_takes_no_message_along() {
    run(|[(one, peer), (two, other)]| async move {
        for number in 0..20_u8 {
            one.send(peer, [number]).await.unwrap();
            let mut dropped = Box::pin(two.receive(other));
            let waker = Waker::noop();
            let polled = dropped.as_mut().poll(&mut Context::from_waker(waker));
            drop(dropped);
            let message = match polled {
                Poll::Ready(message) => message,
                Poll::Pending => two.receive(other).await,
            };
            assert_eq!(message.unwrap(), [number]);
        }
    });
}

#[test]
fn what_waits_ends_with_the_peer_and_with_the_driver() {
    run(|[(one, peer), (two, other)]| async move {
        let waiting = tokio::spawn({
            let two = two.clone();
            async move { two.receive(other).await }
        });
        one.remove(peer).await.unwrap();
        let error = waiting.await.unwrap().unwrap_err();
        assert!(matches!(error, RailsError::UnknownPeer), "{error}");
        let error = one.send(peer, [1]).await.unwrap_err();
        assert!(matches!(error, RailsError::UnknownPeer), "{error}");
    });
    let network = Network::builder().trace_bytes(0).build();
    let (rails, _devices) = rails(&network, 3, 2);
    let (handle, driver) = AsyncRails::new(rails);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let waiting = tokio::spawn({
            let handle = handle.clone();
            async move { handle.next_event().await }
        });
        tokio::time::sleep(Duration::from_millis(1)).await;
        drop(driver);
        for error in [waiting.await.unwrap().unwrap_err(), handle.with(|_| ()).await.unwrap_err()] {
            assert!(error.to_string().contains("driver of the rails has ended"), "{error}");
        }
    });
}

/// A waker is code of the program's.
struct PanicsAsItWakes;

impl Wake for PanicsAsItWakes {
    fn wake(self: Arc<Self>) {
        panic!("as it wakes");
    }
}

#[test]
fn wakers_that_panic_harm_no_other_tasks() {
    run(|[(one, peer), (two, other)]| async move {
        let panics = Waker::from(Arc::new(PanicsAsItWakes));
        let mut cx = Context::from_waker(&panics);
        let mut sends: Vec<_> = (0..2).map(|number| Box::pin(one.send(peer, [number]))).collect();
        sends.push(Box::pin(one.send(PeerId::default(), [9])));
        for send in &mut sends {
            assert!(send.as_mut().poll(&mut cx).is_pending());
        }
        let mut removes = Box::pin(one.remove(PeerId::default()));
        assert!(removes.as_mut().poll(&mut cx).is_pending());
        let mut calls = Box::pin(one.with(|_| ()));
        assert!(calls.as_mut().poll(&mut cx).is_pending());
        one.send(peer, [2]).await.unwrap();
        for number in 0..3 {
            assert_eq!(two.receive(other).await.unwrap(), [number]);
        }
    });
}

/// Some of the calls have begun when the driver is dropped, and some have not.
#[test]
fn all_tasks_wake_without_the_driver_also_if_wakers_panic() {
    struct Counts(AtomicUsize);
    impl Wake for Counts {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }
    let network = Network::builder().trace_bytes(0).build();
    let (rails, _devices) = rails(&network, 1, 1);
    let (handle, driver) = AsyncRails::new(rails);
    let mut driver = Box::pin(driver.run(|_| Poll::Pending));
    let counts = Arc::new(Counts(AtomicUsize::new(0)));
    let wakers = [Waker::from(counts.clone()), Waker::from(Arc::new(PanicsAsItWakes))];
    let (mut waiting, mut far) = (Vec::new(), Vec::new());
    for number in 0..32 {
        let (stream, other) = std::os::unix::net::UnixStream::pair().unwrap();
        stream.set_nonblocking(true).unwrap();
        far.push(other);
        let mut future = Box::pin(handle.accept_over(Unix(stream)));
        let mut cx = Context::from_waker(&wakers[number % 2]);
        assert!(future.as_mut().poll(&mut cx).is_pending());
        waiting.push(future);
        if number == 15 {
            assert!(driver.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        }
    }
    drop(driver);
    assert_eq!(counts.0.load(Ordering::Relaxed), 16);
    for mut future in waiting {
        match future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(Err(RailsError::Control(_))) => {}
            other => panic!("{other:?}"),
        }
    }
}

/// A stream of the program's that panics costs its own peer.
#[test]
fn streams_that_panic_harm_no_other_peer() {
    struct Panics(Unix, &'static str);
    impl Read for Panics {
        fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
            assert_ne!(self.1, "read");
            self.0.read(to)
        }
    }
    impl Write for Panics {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            assert_ne!(self.1, "write");
            self.0.write(bytes)
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    impl ControlStream for Panics {
        fn descriptor(&self) -> Option<BorrowedFd<'_>> {
            assert_ne!(self.1, "descriptor");
            self.0.descriptor()
        }
    }
    impl Drop for Panics {
        fn drop(&mut self) {
            assert_ne!(self.1, "drop");
        }
    }
    run(|[(one, peer), (two, other)]| async move {
        for place in ["read", "write", "drop", "descriptor"] {
            let (stream, mut far) = std::os::unix::net::UnixStream::pair().unwrap();
            stream.set_nonblocking(true).unwrap();
            far.write_all(&[0xff; 8]).unwrap();
            let error = one.connect_over(Panics(Unix(stream), place)).await.unwrap_err();
            let is_told = ["read", "write"].contains(&place);
            assert_eq!(error.to_string().contains("panicked"), is_told, "{error}");
            one.send(peer, [1]).await.unwrap();
            assert_eq!(two.receive(other).await.unwrap(), [1]);
        }
    });
}

/// The program goes on with the rails: what has arrived is there, and what comes later, too.
#[test]
fn what_no_handle_has_taken_is_with_the_rails() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let network = Network::builder().trace_bytes(0).build();
    let _background = network.drive_in_background().unwrap();
    let [(one, _one), (two, _two)] = [1, 2].map(|side| rails(&network, side, 1));
    runtime.block_on(async {
        let [(one, one_driver), (two, two_driver)] = [one, two].map(AsyncRails::new);
        tokio::spawn(one_driver.run_on_tokio());
        let two_driver = tokio::spawn(two_driver.run_on_tokio());
        let (stream, far) = std::os::unix::net::UnixStream::pair().unwrap();
        [&stream, &far].into_iter().for_each(|stream| stream.set_nonblocking(true).unwrap());
        let (peer, other) =
            tokio::join!(one.connect_over(Unix(stream)), two.accept_over(Unix(far)));
        let (peer, other) = (peer.unwrap(), other.unwrap());
        let sends = (0..40_u8).map(|number| {
            let one = one.clone();
            tokio::spawn(async move { one.send(peer, [number]).await })
        });
        let sends: Vec<_> = sends.collect();
        assert_eq!(two.receive(other).await.unwrap(), [0]);
        drop(two);
        let mut rails = two_driver.await.unwrap().unwrap();
        let rest = tokio::task::spawn_blocking(move || {
            let deadline = Instant::now() + Duration::from_secs(60);
            let receive = |_| rails.receive(other, deadline).unwrap()[0];
            let rest = (1..40).map(receive).collect::<Vec<_>>();
            (rest, rails)
        });
        // The rails stay until the sender knows that all has arrived.
        let (rest, _rails) = rest.await.unwrap();
        assert_eq!(rest, (1..40).collect::<Vec<_>>());
        for send in sends {
            send.await.unwrap().unwrap();
        }
    });
}
