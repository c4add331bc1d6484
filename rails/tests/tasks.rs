//! Rails in an asynchronous program: on tokio, on devices of software in real time.

use std::io;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use ibverbs::AccessFlags;
use ibverbs_rails::{
    AsyncRails, Event, PeerId, Rails, RailsDriver, RailsError, RemoteRailMemory, Result, Transfer,
};
use ibverbs_software::{Device, Network};
use tokio::io::unix::AsyncFd;
use tokio::net::{TcpListener, TcpStream};

/// Runs the driver on tokio.
async fn drive(driver: RailsDriver) -> Result<Rails> {
    // An `OwnedFd` is what its successor, which is unsafe, asks for.
    #[allow(deprecated)]
    let file = AsyncFd::new(driver.descriptor()?)?;
    let readable = move |cx: &mut Context<'_>| -> Poll<io::Result<()>> {
        file.poll_read_ready(cx).map_ok(|mut ready| ready.clear_ready())
    };
    driver.run(readable).await
}

/// Two devices of a side.
fn rails(network: &Network, side: u8) -> (Rails, Vec<Device>) {
    let device = |rail: u8| {
        let address = format!("10.0.{rail}.{side}").parse().unwrap();
        let builder = Device::builder().network(network).address(address);
        // No two devices of a process have the same name.
        let name = format!("tasks{}-{rail}-{side}", std::thread::current().name().unwrap().len());
        let device = builder.name(name).build().unwrap();
        device.register();
        device
    };
    let devices: Vec<_> = (0..2).map(device).collect();
    let builder = devices.iter().fold(Rails::builder(), |rails, it| rails.device(it.name()));
    (builder.build().unwrap(), devices)
}

/// Both sides in tasks of one thread.
fn run<F: Future<Output = ()>>(test: impl FnOnce([(AsyncRails, PeerId); 2]) -> F) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let network = Network::builder().trace_bytes(0).build();
    let _background = network.drive_in_background().unwrap();
    let [(one, _one), (two, _two)] = [1, 2].map(|side| rails(&network, side));
    runtime.block_on(async {
        let [(one, one_driver), (two, two_driver)] = [one, two].map(AsyncRails::new);
        let drivers = [one_driver, two_driver].map(|driver| tokio::spawn(drive(driver)));
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
    run(|[(one, peer), (two, other)]| async move {
        let access = AccessFlags::REMOTE_READ | AccessFlags::REMOTE_WRITE;
        let allocate = move |rails: &mut Rails| rails.allocate(4 << 20, access).unwrap();
        let [ours, theirs] = [one.with(allocate).await.unwrap(), two.with(allocate).await.unwrap()];
        ours.write(0, &[7; 4 << 20]).unwrap();
        // The second side tells its memory by a message.
        let config = bincode::config::standard();
        let remote = bincode::serde::encode_to_vec(theirs.remote(), config).unwrap();
        let (sent, got) = tokio::join!(two.send(other, remote), one.receive(peer));
        sent.unwrap();
        let (remote, _): (RemoteRailMemory, _) =
            bincode::serde::decode_from_slice(&got.unwrap(), config).unwrap();
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
    });
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
        one.with(move |rails| rails.remove(peer)).await.unwrap();
        let error = waiting.await.unwrap().unwrap_err();
        assert!(matches!(error, RailsError::UnknownPeer), "{error}");
        let error = one.send(peer, [1]).await.unwrap_err();
        assert!(matches!(error, RailsError::UnknownPeer), "{error}");
    });
    let network = Network::builder().trace_bytes(0).build();
    let (rails, _devices) = rails(&network, 3);
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
