//! Peers that die or leave: loops and futures end the operations of their channels, and all room comes back. Data that was
//! sent before comes first. Nobody posts anything to find out.

#[path = "support/child.rs"]
mod child;
#[path = "support/patience.rs"]
mod patience;

use std::future::Future;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, AsRawFd};
use std::sync::{Arc, Mutex};

use ibverbs::future::{AsyncChannel, Local, Locked};
use ibverbs::pool::BufferPool;
use ibverbs::{
    AccessFlags, Channel, ChannelBuilder, ChannelId, Loop, PooledBuffer, ProtectionDomain, Reactor,
    ReceiveWorkRequest, SendWorkRequest, TransportError,
};
use ibverbs_software::Device;

use child::{Process, is_child, parent};
use patience::{PATIENCE, deadline};

const PEERS: usize = 5;
const ROOM: u32 = 8 * PEERS as u32;
const CHUNKS: usize = 64;

struct Host {
    domain: Arc<ProtectionDomain<'static>>,
    pool: BufferPool,
}

impl Host {
    fn new() -> Self {
        let context = Device::new().unwrap().open().unwrap();
        let domain = Arc::new(ProtectionDomain::new(Arc::new(context)).unwrap());
        let pool = BufferPool::new(&domain, 64, CHUNKS, AccessFlags::empty()).unwrap();
        Self { domain, pool }
    }

    fn server(&self) -> Loop<'static, PooledBuffer> {
        Loop::new(self.domain.context_parent(), ROOM).unwrap()
    }
}

/// Takes its part of the room whole.
fn sized(builder: ChannelBuilder<'static>) -> ChannelBuilder<'static> {
    builder.max_send_wr(4).max_recv_wr(4)
}

/// The child's part: connects as often as the parent accepts, and waits for its end.
#[test]
fn connects_and_is_killed() {
    if !is_child("connects_and_is_killed") {
        return;
    }
    let host = Host::new();
    let channels: Vec<_> = (0..PEERS).map(|_| client(&host, parent())).collect();
    println!("connected");
    std::thread::sleep(PATIENCE);
    drop(channels);
}

fn client(host: &Host, address: SocketAddr) -> Channel<'static> {
    let prepared = sized(Channel::builder(&host.domain)).build().unwrap();
    prepared.connect(address, b"", deadline()).unwrap().0
}

/// How a server waits.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Wait {
    Blocking,
    Until,
    Spinning,
    /// On the loop's descriptor.
    Ready,
    /// A thread with a `LoopWaiter`, the loop behind a lock.
    Waiter,
}

const WAITS: [Wait; 5] = [Wait::Blocking, Wait::Until, Wait::Spinning, Wait::Ready, Wait::Waiter];

/// Waits until all channels are gone, and removes each for the first sign of that.
fn serve_until_all_are_gone(server: Loop<'static, PooledBuffer>, wait: Wait, of_idle: bool) {
    let server = Mutex::new(server);
    let waiter = server.lock().unwrap().waiter();
    let mut gone: Vec<ChannelId> = Vec::new();
    let end = deadline();
    while server.lock().unwrap().capacity().1 < ROOM {
        assert!(std::time::Instant::now() < end, "{wait:?}: {} of {PEERS} are gone", gone.len());
        let mut server_now = server.lock().unwrap();
        let ended = match wait {
            Wait::Blocking => match server_now.wait_ended() {
                Err(TransportError::PeerGone) if of_idle => None,
                ended => Some(ended.unwrap()),
            },
            Wait::Until => server_now.wait_ended_until(end).unwrap(),
            Wait::Spinning => server_now.next_ended().unwrap(),
            Wait::Ready => {
                server_now.arm().unwrap();
                let ended = server_now.next_ended().unwrap();
                if ended.is_none()
                    && server_now.next_gone().is_some_and(|channel| {
                        gone.push(channel);
                        server_now.remove(channel).unwrap();
                        true
                    })
                {
                    continue;
                }
                if ended.is_none() {
                    let fd = server_now.as_fd().as_raw_fd();
                    let mut file = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
                    // SAFETY: one writable entry; the loop keeps the file open.
                    unsafe { libc::poll(&mut file, 1, PATIENCE.as_millis() as i32) };
                }
                ended
            }
            Wait::Waiter => {
                drop(server_now);
                let armed = waiter.arm().unwrap();
                let ended = server.lock().unwrap().next_ended().unwrap();
                server_now = server.lock().unwrap();
                if ended.is_none()
                    && !server_now.next_gone().is_some_and(|channel| {
                        gone.push(channel);
                        server_now.remove(channel).unwrap();
                        true
                    })
                {
                    drop(server_now);
                    assert!(armed.wait_until(end).unwrap(), "{wait:?}");
                    continue;
                }
                ended
            }
        };
        match ended {
            Some(ended) => {
                assert_eq!(ended.result().unwrap_err(), TransportError::PeerGone);
                if !gone.contains(&ended.channel) {
                    gone.push(ended.channel);
                    server_now.remove(ended.channel).unwrap();
                }
            }
            None => {
                while let Some(channel) = server_now.next_gone() {
                    assert!(of_idle);
                    gone.push(channel);
                    server_now.remove(channel).unwrap();
                }
            }
        }
    }
    assert_eq!(gone.len(), PEERS);
}

#[test]
fn a_loop_gets_its_room_back_from_clients_that_are_killed() {
    let host = Host::new();
    for (number, wait) in WAITS.into_iter().enumerate() {
        let of_idle = number % 2 == 1 || wait == Wait::Waiter;
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut child = Process::run("connects_and_is_killed", listener.local_addr().unwrap());
        let mut server = host.server();
        // Its descriptor is known before any peer is.
        assert!(server.as_fd().as_raw_fd() >= 0);
        for _ in 0..PEERS {
            let prepared = sized(server.create_channel(&host.domain)).build().unwrap();
            let (channel, _) = prepared.accept(&listener, b"", deadline()).unwrap();
            let channel = server.add(channel).unwrap();
            if !of_idle {
                let buffer = host.pool.take().unwrap();
                server.post(channel, ReceiveWorkRequest::new(buffer), 0).unwrap();
            }
        }
        assert_eq!(server.capacity().1, 0);
        child.wait_for("connected");
        std::thread::scope(|threads| {
            threads.spawn(|| child.kill());
            serve_until_all_are_gone(server, wait, of_idle);
        });
        assert_eq!(host.pool.available(), CHUNKS);
    }
}

/// The server has its loop, and a thread for the client.
fn with_client(
    host: &Host,
    server: &mut Loop<'static, PooledBuffer>,
    receives: usize,
    client_does: impl FnOnce(Channel<'static>) + Send,
    then: impl FnOnce(&mut Loop<'static, PooledBuffer>, ChannelId),
) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::scope(|threads| {
        let (posted, are_posted) = std::sync::mpsc::channel();
        threads.spawn(move || {
            let channel = client(host, address);
            are_posted.recv().unwrap();
            client_does(channel);
        });
        let prepared = sized(server.create_channel(&host.domain)).build().unwrap();
        let (channel, _) = prepared.accept(&listener, b"", deadline()).unwrap();
        let channel = server.add(channel).unwrap();
        for token in 0..receives {
            let buffer = host.pool.take().unwrap();
            server.post(channel, ReceiveWorkRequest::new(buffer), token as u64).unwrap();
        }
        posted.send(()).unwrap();
        then(server, channel);
    });
}

#[test]
fn what_a_peer_has_sent_before_it_leaves_comes_first_and_what_is_posted_later_ends_too() {
    let host = Host::new();
    let mut server = host.server();
    for sent in [0, 1, 3, 4] {
        let sends = |mut channel: Channel<'static>| {
            let data = host.domain.allocate::<u8>(8).unwrap();
            (0..sent).for_each(|_| {
                channel.until(deadline()).send(data.slice(..).unwrap()).unwrap();
            });
        };
        with_client(&host, &mut server, 4, sends, |server, channel| {
            for token in 0..4 {
                let ended = server.wait_ended_until(deadline()).unwrap();
                let Some(ended) = ended else {
                    assert_eq!((token, server.next_gone()), (sent, Some(channel)));
                    break;
                };
                assert_eq!((ended.channel, ended.token), (channel, token));
                let expected = if token < sent { Ok(8) } else { Err(TransportError::PeerGone) };
                assert_eq!(ended.result().map(|success| success.byte_len()), expected);
            }
            if sent == 4 {
                // Nothing was left to say so.
                assert!(server.wait_ended_until(deadline()).unwrap().is_none());
                assert_eq!(server.next_gone(), Some(channel));
            }
            assert_eq!(server.next_gone(), None);
            let buffer = || host.pool.take().unwrap();
            server.post(channel, SendWorkRequest::new(buffer()), 8).unwrap();
            server.post(channel, ReceiveWorkRequest::new(buffer()), 9).unwrap();
            for _ in 0..2 {
                let ended = server.wait_ended_until(deadline()).unwrap().unwrap();
                let error = ended.result().unwrap_err();
                assert_eq!(error, TransportError::PeerGone);
                assert!(error.is_peer_gone() && ended.token >= 8);
            }
            server.remove(channel).unwrap();
            assert_eq!(server.capacity().1, ROOM);
        });
    }
}

#[test]
fn a_peer_that_leaves_while_its_channel_is_out_of_the_loop_is_noticed_when_it_is_back() {
    let host = Host::new();
    let mut server = host.server();
    let (leave, may_leave) = std::sync::mpsc::channel::<()>();
    let (left, has_left) = std::sync::mpsc::channel::<()>();
    let leaves = move |channel: Channel<'static>| {
        may_leave.recv().unwrap();
        drop(channel);
        left.send(()).unwrap();
    };
    with_client(&host, &mut server, 1, leaves, |server, channel| {
        let detached = server.take_out(channel).unwrap();
        leave.send(()).unwrap();
        has_left.recv().unwrap();
        server.arm().unwrap();
        assert!(server.next_ended().unwrap().is_none(), "it is out");
        server.put_back(detached).unwrap();
        let ended = server.wait_ended().unwrap();
        assert_eq!(ended.result().unwrap_err(), TransportError::PeerGone);
    });
}

/// Of many channels that share receives, none has one of its own in flight.
#[test]
fn a_channel_with_shared_receives_is_gone_though_nothing_of_its_own_is_in_flight() {
    let host = Host::new();
    let mut server = host.server();
    let receives = server.add_shared_receives(&host.domain, 4).unwrap();
    for _ in 0..4 {
        let buffer = host.pool.take().unwrap();
        server.post(receives, ReceiveWorkRequest::new(buffer), 0).unwrap();
    }
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::scope(|threads| {
        threads.spawn(|| drop(client(&host, address)));
        let builder = server.create_sharing_channel(&host.domain, receives).unwrap();
        let prepared = builder.max_send_wr(4).build().unwrap();
        let (channel, _) = prepared.accept(&listener, b"", deadline()).unwrap();
        let channel = server.add(channel).unwrap();
        assert_eq!(server.wait_ended().unwrap_err(), TransportError::PeerGone);
        assert_eq!(server.next_gone(), Some(channel));
        server.remove(channel).unwrap();
    });
}

fn block_on(future: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let local = tokio::task::LocalSet::new();
        tokio::time::timeout(PATIENCE, local.run_until(future)).await.expect("a wait has no end");
    });
}

/// Tasks of all kinds wait for peers that are killed.
async fn tasks_wait<S>(reactor: Arc<Reactor<S>>, host: &Host)
where
    S: ibverbs::future::Share<Buffer = PooledBuffer> + 'static,
    AsyncChannel<S>: 'static,
{
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut child = Process::run("connects_and_is_killed", listener.local_addr().unwrap());
    let room = reactor.capacity().1;
    let driver = tokio::task::spawn_local({
        let reactor = reactor.clone();
        async move { reactor.run_on_tokio().await }
    });
    let mut tasks = Vec::new();
    for number in 0..PEERS {
        let prepared = reactor.prepare(sized(Channel::builder(&host.domain))).unwrap();
        let (mut stream, _) = listener.accept().await.unwrap();
        let (channel, _) = prepared.accept(&mut stream, b"").await.unwrap();
        // The channel has its own descriptor of the stream.
        drop(stream);
        let channel = Arc::new(channel);
        let buffer = || host.pool.take().unwrap();
        match number {
            // More tasks than receives.
            0 => channel.post_receive(buffer()).map_err(|failed| failed.error).unwrap(),
            // Longer than the queue.
            1 => {}
            // A send that nobody receives.
            2 => {
                let (channel, buffer) = (channel.clone(), buffer());
                tasks.push(tokio::task::spawn_local(async move {
                    let failed = channel.send(buffer).await.unwrap_err();
                    assert!(failed.buffer.is_some());
                    failed.error
                }));
            }
            _ => {}
        }
        for _ in 0..6 {
            let (channel, buffer) = (channel.clone(), (number != 0).then(buffer));
            tasks.push(tokio::task::spawn_local(async move {
                let failed = match buffer {
                    Some(buffer) => channel.receive(buffer).await.unwrap_err(),
                    None => channel.next_message().await.unwrap_err(),
                };
                failed.error
            }));
        }
    }
    assert_eq!(reactor.capacity().1, room - 8 * PEERS as u32);
    tokio::task::yield_now().await;
    child.kill();
    for task in tasks {
        assert_eq!(task.await.unwrap(), TransportError::PeerGone);
    }
    assert_eq!(reactor.capacity().1, room);
    assert_eq!(host.pool.available(), CHUNKS);
    driver.abort();
}

#[test]
fn tasks_that_wait_for_a_peer_that_is_killed_end_with_their_buffers() {
    let host = Host::new();
    let context = host.domain.context_parent();
    let locked = Reactor::<Locked<PooledBuffer>>::with_share(context, 64).unwrap();
    block_on(tasks_wait(Arc::new(locked), &host));
    let context = host.domain.context_parent();
    #[expect(clippy::arc_with_non_send_sync, reason = "both kinds are shared in one way")]
    let local = Arc::new(Reactor::<Local<PooledBuffer>>::with_share(context, 64).unwrap());
    block_on(tasks_wait(local, &host));
}

#[test]
fn a_channel_of_a_task_has_its_messages_before_it_is_told_that_the_peer_is_gone() {
    let host = Host::new();
    let reactor = Arc::new(Reactor::new(host.domain.context_parent(), 64).unwrap());
    block_on(async {
        let driver = tokio::task::spawn_local({
            let reactor = reactor.clone();
            async move { reactor.run_on_tokio().await }
        });
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let mut prepared = reactor.prepare(sized(Channel::builder(&host.domain))).unwrap();
        for _ in 0..4 {
            prepared
                .post_receive(host.pool.take().unwrap())
                .map_err(|failed| failed.error)
                .unwrap();
        }
        let client = Host::new();
        let sends = std::thread::spawn(move || {
            let mut channel = self::client(&client, address);
            let data = client.domain.allocate::<u8>(8).unwrap();
            for _ in 0..3 {
                channel.until(deadline()).send(data.slice(..).unwrap()).unwrap();
            }
            drop((channel, data));
        });
        let (mut stream, _) = listener.accept().await.unwrap();
        let (channel, _) = prepared.accept(&mut stream, b"").await.unwrap();
        sends.join().unwrap();
        for _ in 0..3 {
            let (message, _) = channel.next_message().await.unwrap();
            assert_eq!(message.len(), 8);
        }
        for _ in 0..3 {
            let error = channel.next_message().await.unwrap_err().error;
            assert_eq!(error, TransportError::PeerGone);
        }
        let late = channel.send(host.pool.take().unwrap()).await.unwrap_err();
        assert_eq!((late.error, late.buffer.is_some()), (TransportError::PeerGone, true));
        driver.abort();
    });
}

/// A process without a processor is not gone.
#[test]
fn a_client_that_is_stopped_is_waited_for_until_it_is_killed() {
    let host = Host::new();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut child = Process::run("connects_and_is_killed", listener.local_addr().unwrap());
    let mut server = host.server();
    for _ in 0..PEERS {
        let prepared = sized(server.create_channel(&host.domain)).build().unwrap();
        let (channel, _) = prepared.accept(&listener, b"", deadline()).unwrap();
        let channel = server.add(channel).unwrap();
        let buffer = host.pool.take().unwrap();
        server.post(channel, ReceiveWorkRequest::new(buffer), 0).unwrap();
    }
    child.wait_for("connected");
    // SAFETY: no memory is involved; the child is ours, and was not waited for.
    assert_eq!(unsafe { libc::kill(child.0.id() as libc::pid_t, libc::SIGSTOP) }, 0);
    let soon = std::time::Instant::now() + std::time::Duration::from_millis(50);
    assert!(server.wait_ended_until(soon).unwrap().is_none() && server.next_gone().is_none());
    child.kill();
    serve_until_all_are_gone(server, Wait::Until, false);
}

/// Channels whose clients have sent nothing, and a call that has them leave.
async fn channels_of_tasks(
    reactor: &Reactor,
    host: &Host,
) -> (Vec<Arc<AsyncChannel>>, impl FnOnce() + use<>) {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let clients = std::thread::spawn(move || {
        let host = Host::new();
        let channels: Vec<_> = (0..2).map(|_| client(&host, address)).collect();
        (channels, host)
    });
    let mut channels = Vec::new();
    for _ in 0..2 {
        let prepared = reactor.prepare(sized(Channel::builder(&host.domain))).unwrap();
        let (mut stream, _) = listener.accept().await.unwrap();
        channels.push(Arc::new(prepared.accept(&mut stream, b"").await.unwrap().0));
    }
    let clients = clients.join().unwrap();
    (channels, move || drop(clients))
}

/// Nothing was posted for the messages, or less than there are tasks.
#[test]
fn tasks_that_wait_for_messages_of_a_channel_that_fails_are_told_though_the_peer_lives() {
    for receives in [0, 2] {
        let host = Host::new();
        let reactor = Arc::new(Reactor::new(host.domain.context_parent(), 64).unwrap());
        block_on(async {
            let driver = tokio::task::spawn_local({
                let reactor = reactor.clone();
                async move { reactor.run_on_tokio().await }
            });
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
            let address = listener.local_addr().unwrap();
            let (leave, may_leave) = std::sync::mpsc::channel::<()>();
            let peer = std::thread::spawn(move || {
                let host = Host::new();
                let _channel = client(&host, address);
                may_leave.recv().unwrap();
            });
            let prepared = reactor.prepare(sized(Channel::builder(&host.domain))).unwrap();
            let (mut stream, _) = listener.accept().await.unwrap();
            let channel = Arc::new(prepared.accept(&mut stream, b"").await.unwrap().0);
            for _ in 0..receives {
                let posted = channel.post_receive(host.pool.take().unwrap());
                posted.map_err(|failed| failed.error).unwrap();
            }
            let waits = |_| {
                let channel = channel.clone();
                tokio::task::spawn_local(async move { channel.next_message().await })
            };
            let waiting: Vec<_> = (0..3).map(waits).collect();
            tokio::task::yield_now().await;
            // The peer has no such memory.
            let region = host.domain.allocate_shared::<u8>(8, AccessFlags::REMOTE_WRITE).unwrap();
            let remote = region.remote();
            let buffer = host.pool.take_from(&[0; 8]).unwrap().unwrap();
            let failed = channel.write(buffer, remote).await.unwrap_err().error;
            assert!(!failed.is_peer_gone(), "{failed}");
            for task in waiting {
                let error = task.await.unwrap().unwrap_err().error;
                assert!(!error.is_peer_gone(), "{error}");
            }
            assert!(channel.next_message().await.is_err());
            leave.send(()).unwrap();
            peer.join().unwrap();
            driver.abort();
        });
    }
}

/// Nobody drives the reactor when the peers leave. Who drives it later finds that.
#[test]
fn peers_that_leave_between_two_runtimes_are_noticed_by_the_second() {
    let host = Host::new();
    let reactor = Arc::new(Reactor::new(host.domain.context_parent(), 64).unwrap());
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let first = runtime();
    let drives = |runtime: &tokio::runtime::Runtime| {
        let reactor = reactor.clone();
        runtime.spawn(async move { reactor.run_on_tokio().await });
    };
    drives(&first);
    let (channels, leave) = first.block_on(channels_of_tasks(&reactor, &host));
    let given_up = first.block_on(async {
        let short = std::time::Duration::from_millis(5);
        tokio::time::timeout(short, channels[0].receive(host.pool.take().unwrap())).await
    });
    assert!(given_up.is_err());
    drop(first);
    leave();
    let second = runtime();
    drives(&second);
    second.block_on(async {
        for channel in &channels {
            let receive = channel.receive(host.pool.take().unwrap());
            let failed = tokio::time::timeout(PATIENCE, receive).await.unwrap().unwrap_err();
            assert_eq!(failed.error, TransportError::PeerGone);
        }
    });
    drop(channels);
    assert_eq!((host.pool.available(), reactor.capacity().1), (CHUNKS, 64));
}

/// The other channel's task is woken all the same.
#[test]
fn a_waker_that_panics_when_its_peer_is_gone_takes_no_wake_up_from_others() {
    use std::pin::pin;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::{Context, Wake};

    struct Task(AtomicUsize, bool);

    impl Wake for Task {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
            assert!(!self.1, "in a waker");
        }
    }

    for panicking in 0..2 {
        let host = Host::new();
        let reactor = Reactor::new(host.domain.context_parent(), 64).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let (channels, leave) = runtime.block_on(channels_of_tasks(&reactor, &host));
        let tasks = [0, 1].map(|of| Arc::new(Task(AtomicUsize::new(0), of == panicking)));
        let mut waits = [0, 1].map(|of| Box::pin(channels[of].next_message()));
        for (wait, task) in waits.iter_mut().zip(&tasks) {
            let waker = task.clone().into();
            assert!(pin!(wait).poll(&mut Context::from_waker(&waker)).is_pending());
        }
        leave();
        let end = deadline();
        while tasks.iter().any(|task| task.0.load(Ordering::SeqCst) == 0) {
            assert!(std::time::Instant::now() < end, "{panicking}");
            let turn = || {
                reactor.arm().unwrap();
                reactor.turn().unwrap()
            };
            // A panic in a waker goes on from the turn.
            let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(turn));
        }
        for wait in &mut waits {
            let ended = pin!(wait).poll(&mut Context::from_waker(std::task::Waker::noop()));
            let std::task::Poll::Ready(Err(failed)) = ended else { panic!("it waits on") };
            assert_eq!(failed.error, TransportError::PeerGone);
        }
    }
}
