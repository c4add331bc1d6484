//! Connections by IP address in asynchronous programs: every wait is a future on tokio.

use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::task::{Context, Wake, Waker};
use std::time::{Duration, Instant};

use ibverbs::channel::ScopeError;
use ibverbs::future::PreparedAsyncChannel;
use ibverbs::rdmacm::{
    Connection, ConnectionError, ConnectionEventKind as Kind, ConnectionRequest, Listener,
    PendingConnection, Route,
};
use ibverbs::{
    AccessFlags, AsyncChannel, BufferPool, Channel, ErrorKind, Inline, Loop, PooledBuffer,
    ProtectionDomain, Reactor, ReceiveWorkRequest, TransportError,
};
use tokio::runtime::{Builder, Runtime};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::managed::{Device, TIME, connect, here, is_iwarp, listen, nothing_is_left};
use crate::vm::alone;

const LEN: usize = 64;
const CHUNKS: usize = 256;

/// Receives that each channel keeps posted.
const RECEIVES: usize = 4;

pub(crate) type Managed = Connection<AsyncChannel>;

/// The objects that a program has once: its device, a reactor that runs, and buffers.
pub(crate) struct Program {
    domain: Arc<ProtectionDomain<'static>>,
    reactor: Arc<Reactor>,
    pub(crate) pool: BufferPool,
    running: JoinHandle<ibverbs::Result<()>>,
}

impl Program {
    fn start() -> Self {
        let context = Arc::new(ibverbs::open(crate::managed::first_device()).unwrap());
        let domain = Arc::new(ProtectionDomain::new(&context).unwrap());
        let reactor = Arc::new(Reactor::new(&context, 2048).unwrap());
        let pool = BufferPool::new(&domain, LEN, CHUNKS, AccessFlags::empty()).unwrap();
        let runs = reactor.clone();
        let running = tokio::spawn(async move { runs.run_on_tokio().await });
        Self { domain, reactor, pool, running }
    }

    /// Waits until all buffers are back, ends the reactor, and looks for what is left.
    async fn end(self) {
        let start = std::time::Instant::now();
        while self.pool.available() < CHUNKS {
            assert!(start.elapsed() < TIME, "{:?}", self.pool);
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        assert!(!self.running.is_finished());
        self.reactor.stop(TransportError::Stopped);
        self.running.await.unwrap().unwrap();
        drop((self.pool, self.reactor, self.domain));
        nothing_is_left();
    }

    fn prepare(&self, port: u8) -> PreparedAsyncChannel {
        self.reactor.prepare(Channel::builder(&self.domain).port(port).max_recv_wr(8)).unwrap()
    }

    fn text(&self, text: &[u8]) -> PooledBuffer {
        self.pool.take_from(text).unwrap().expect("a free buffer")
    }

    /// Posts the receives: on iWARP each message must find one.
    fn post_receives(&self, pending: &mut PendingConnection<AsyncChannel>) {
        for _ in 0..RECEIVES {
            pending.queue_pair().post_receive(self.pool.take().unwrap()).unwrap();
        }
    }

    pub(crate) async fn connect(&self, address: SocketAddr) -> Result<Managed, ConnectionError> {
        let route = Route::to(address).resolve_on_tokio(Instant::now() + TIME).await?;
        let prepared = self.prepare(route.port());
        let mut pending = route.prepare(prepared).map_err(|(.., error)| error)?;
        self.post_receives(&mut pending);
        pending.start(b"asynchronous")?.finish_on_tokio().await
    }

    pub(crate) async fn accept(
        &self,
        request: ConnectionRequest,
    ) -> Result<Managed, ConnectionError> {
        let prepared = self.prepare(request.port());
        let mut pending = request.prepare(prepared).map_err(|(.., error)| error)?;
        self.post_receives(&mut pending);
        pending.start(b"welcome")?.finish_on_tokio().await
    }

    async fn says(&self, channel: &AsyncChannel, text: &[u8]) -> Result<(), TransportError> {
        channel.send(self.text(text)).await.map(|_| ()).map_err(|failed| failed.error)
    }

    /// The next message. Its buffer is for a later one.
    async fn hears(&self, channel: &AsyncChannel) -> Result<Vec<u8>, TransportError> {
        let got = channel.receive(self.pool.take().unwrap()).await;
        let (buffer, success) = got.map_err(|failed| failed.error)?;
        Ok(buffer[..success.byte_len() as usize].to_vec())
    }
}

/// Runs the test on both kinds of runtime.
pub(crate) fn on_both<F: Future<Output = ()>>(test: impl Fn(Arc<Program>) -> F) {
    on(current_thread(), &test);
    on(Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap(), &test);
}

fn current_thread() -> Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
}

fn on<F: Future<Output = ()>>(runtime: Runtime, test: impl Fn(Arc<Program>) -> F) {
    runtime.block_on(async {
        let program = Arc::new(Program::start());
        timeout(TIME, test(program.clone())).await.unwrap();
        Arc::into_inner(program).expect("no task is left").end().await;
    });
}

/// The peer of a connection that has ended, which must hear of it.
async fn ends(mut connection: Managed) {
    assert_eq!(connection.event_on_tokio().await.unwrap().kind(), Kind::Disconnected);
    connection.disconnect().unwrap();
}

/// Soft-iWARP completes nothing that is posted after the end of a connection.
#[test]
fn what_is_posted_after_the_end_ends_too() {
    let _alone = alone("after the end", 240);
    if !is_iwarp() {
        return;
    }
    on_both(|program| async move {
        let (mut listener, address) = listen();
        let accepting = async {
            let request = listener.next_on_tokio().await.unwrap();
            program.accept(request).await.unwrap()
        };
        let (one, two) = tokio::join!(program.connect(address), accepting);
        let (one, _control) = one.unwrap().into_parts();
        drop(two);
        // The receives are flushed; what comes later is not.
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert!(program.says(&one, b"into the void").await.is_err());
        one.keep_alive(|| tokio::time::sleep(Duration::from_millis(50))).await;
    });
}

#[test]
fn channels_are_connected_and_hear_of_the_end() {
    let _alone = alone("asynchronous", 240);
    on_both(|program| async move {
        let (mut listener, address) = listen();
        let both = async {
            let request = listener.next_on_tokio().await.unwrap();
            assert_eq!(request.private_data().trim_end(), b"asynchronous");
            program.accept(request).await.unwrap()
        };
        let (one, two) = tokio::join!(program.connect(address), both);
        let mut one = one.unwrap();
        assert_eq!(one.private_data().trim_end(), b"welcome");
        assert_eq!((one.peer_addr(), one.local_addr()), (two.local_addr(), two.peer_addr()));
        for round in 0..20 {
            // The side that has connected sends first.
            let text = format!("one to two, {round}");
            program.says(&one, text.as_bytes()).await.unwrap();
            assert_eq!(program.hears(&two).await.unwrap(), text.as_bytes());
            let text = format!("two to one, {round}");
            let (said, heard) =
                tokio::join!(program.says(&two, text.as_bytes()), program.hears(&one));
            said.unwrap();
            assert_eq!(heard.unwrap(), text.as_bytes());
        }
        one.shutdown().await;
        one.disconnect().unwrap();
        let failed = program.says(&one, b"late").await.unwrap_err();
        assert_eq!(failed, TransportError::Stopped);
        let mut two = two;
        assert_eq!(two.event_on_tokio().await.unwrap().kind(), Kind::Disconnected);
        two.disconnect().unwrap();
        let failed = two.receive(program.pool.take().unwrap()).await.unwrap_err();
        assert!(failed.error.is_consequence() || failed.error.is_peer_gone(), "{}", failed.error);
        assert!(failed.buffer.is_some());
    });
}

/// Nobody reads the connection manager's events.
#[test]
fn a_peer_that_leaves_ends_what_waits_for_it() {
    let _alone = alone("a peer leaves", 240);
    on_both(|program| async move {
        let (mut listener, address) = listen();
        for is_split in [false, true] {
            let both = async {
                let request = listener.next_on_tokio().await.unwrap();
                program.accept(request).await.unwrap()
            };
            let (one, two) = tokio::join!(program.connect(address), both);
            let one = one.unwrap();
            program.says(&one, b"last words").await.unwrap();
            let (channel, mut control) = if is_split {
                let (channel, control) = two.into_parts();
                (Ok(channel), Some(control))
            } else {
                (Err(two), None)
            };
            let channel = channel.as_ref().unwrap_or_else(|two| two);
            drop(one);
            assert_eq!(program.hears(channel).await.unwrap(), b"last words");
            for _ in 0..=RECEIVES {
                let error = program.hears(channel).await.unwrap_err();
                // The device of iWARP has told.
                assert!(error == TransportError::PeerGone || is_iwarp(), "{error}");
            }
            // The event is still there.
            if let Some(control) = &mut control {
                let event = control.event_on_tokio().await.unwrap();
                assert_eq!(event.kind(), Kind::Disconnected);
            }
        }
    });
}

/// As a server has them: no event of any connection is read, and all of its room comes back.
#[test]
fn a_loop_gets_its_room_back_from_peers_that_leave() {
    let _alone = alone("peers leave a loop", 240);
    let device = Device::first();
    let pool = BufferPool::new(&device.domain, LEN, CHUNKS, AccessFlags::empty()).unwrap();
    let mut server = Loop::<PooledBuffer>::new(device.domain.context_parent(), 8 * 4).unwrap();
    // A device may give a completion queue more room than was asked for.
    let room = server.capacity().1;
    let (mut listener, address) = listen();
    let mut controls = Vec::new();
    for number in 0..4 {
        let client = std::thread::spawn(move || connect(address, b"").unwrap());
        let request = listener.next_until(Instant::now() + TIME).unwrap();
        let builder = server.create_channel(&device.domain).port(request.port());
        let prepared = builder.max_send_wr(4).max_recv_wr(4).build().unwrap();
        let connection = request.accept(prepared, b"", Instant::now() + TIME).unwrap();
        let (channel, control) = connection.into_parts();
        controls.push(control);
        let channel = server.add(channel).unwrap();
        // The queue pair of iWARP tells, if there is something in flight.
        if number % 2 == 0 || is_iwarp() {
            let receive = ReceiveWorkRequest::new(pool.take().unwrap());
            server.post(channel, receive, 0).unwrap();
        }
        // It leaves at once.
        drop(client.join().unwrap());
    }
    assert_eq!(server.capacity().1, room - 8 * 4);
    let deadline = std::time::Instant::now() + TIME;
    while server.capacity().1 < room {
        match server.wait_ended_until(deadline).unwrap() {
            Some(ended) => {
                let error = ended.result().unwrap_err();
                assert!(error == TransportError::PeerGone || is_iwarp(), "{error}");
                server.remove(ended.channel).unwrap();
            }
            None => {
                let channel = server.next_gone().expect("the time is over");
                server.remove(channel).unwrap();
            }
        }
    }
    drop((controls, server, pool, listener, device));
    nothing_is_left();
}

#[test]
fn nothing_but_receives_is_posted_before_the_connection() {
    let _alone = alone("not yet", 240);
    on_both(|program| async move {
        let (mut listener, address) = listen();
        let route = Route::to(address).resolve_on_tokio(Instant::now() + TIME).await.unwrap();
        let prepared = program.prepare(route.port());
        let mut pending = route.prepare(prepared).map_err(|(.., error)| error).unwrap();
        program.post_receives(&mut pending);
        let early = || program.text(b"early");
        let failed = pending.queue_pair().send(early()).await.unwrap_err();
        assert_eq!(failed.error, TransportError::NotConnected);
        assert_eq!(failed.buffer.unwrap()[..], *b"early");

        let mut connecting = pending.start(b"").unwrap();
        let failed = connecting.queue_pair().send(early()).await.unwrap_err();
        assert_eq!(failed.error, TransportError::NotConnected);
        let accepted = async {
            let request = listener.next_on_tokio().await.unwrap();
            program.accept(request).await.unwrap()
        };
        let (one, two) = tokio::join!(connecting.finish_on_tokio(), accepted);
        let one = one.unwrap();
        program.says(&one, b"now").await.unwrap();
        assert_eq!(program.hears(&two).await.unwrap(), b"now");
        drop(one);
        ends(two).await;
    });
    blocking_channels_say_the_same();
    nothing_is_left();
}

fn blocking_channels_say_the_same() {
    let (mut listener, address) = listen();
    let device = Device::first();
    let route = Route::resolve(address, Instant::now() + TIME).unwrap();
    let mut pending = route.prepare(device.prepare()).map_err(|(.., error)| error).unwrap();
    let mut other = device.domain.allocate::<u8>(8).unwrap();
    let message = device.domain.allocate::<u8>(8).unwrap();
    let channel = pending.queue_pair();
    let not_connected = Err(TransportError::NotConnected);
    assert_eq!(channel.send(message.slice(..).unwrap()).map(|_| ()), not_connected);
    assert_eq!(channel.send(Inline(b"early")).map(|_| ()), not_connected);
    let refused: Result<(), ScopeError<_>> = channel.scope(|scope| {
        let _receive = scope.post_receive(other.slice_mut(..).unwrap())?;
        assert!(!scope.can_post_send());
        scope.post_send(message.slice(..).unwrap()).map(|_| ())
    });
    assert_eq!(refused, Err(ScopeError::Closure(TransportError::NotConnected)));
    drop(pending);
    assert!(listener.try_next().unwrap().is_none());
}

/// Receives of a channel that is prepared only, as for a handshake. On iWARP nothing takes them there.
#[test]
fn receives_that_were_posted_before_stay_posted() {
    let _alone = alone("posted before", 240);
    on_both(|program| async move {
        let (mut listener, address) = listen();
        let mut prepared = program.prepare(1);
        if is_iwarp() {
            let refused = prepared.post_receive(program.text(b"")).unwrap_err();
            assert!(refused.buffer.is_some());
            let TransportError::Verbs(error) = refused.error else { panic!("{}", refused.error) };
            assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
            return;
        }
        for _ in 0..2 {
            prepared.post_receive(program.pool.take().unwrap()).unwrap();
        }
        let accepted = async {
            let request = listener.next_on_tokio().await.unwrap();
            request.accept_on_tokio(prepared, b"").await.unwrap()
        };
        let (one, two) = tokio::join!(program.connect(address), accepted);
        let one = one.unwrap();
        for text in [b"first", b"later"] {
            program.says(&one, text).await.unwrap();
        }
        for text in [b"first", b"later"] {
            assert_eq!(program.hears(&two).await.unwrap(), text);
        }
        drop(one);
        ends(two).await;
    });
}

/// A task that panics when it is woken is no reason to leave the peer in the dark. (In one thread: on iWARP, the reactor on
/// another one may be who wakes it, and end by that.)
#[test]
fn a_waker_that_panics_keeps_nobody_from_disconnecting() {
    struct Panics;
    impl Wake for Panics {
        fn wake(self: Arc<Self>) {
            panic!("on purpose");
        }
    }
    let _alone = alone("panicking waker", 240);
    on(current_thread(), |program| async move {
        let (mut listener, address) = listen();
        let accepted = async {
            let request = listener.next_on_tokio().await.unwrap();
            program.accept(request).await.unwrap()
        };
        let (one, two) = tokio::join!(program.connect(address), accepted);
        let mut one = one.unwrap();
        let mut receive = one.receive(program.pool.take().unwrap());
        let waker = Waker::from(Arc::new(Panics));
        let polled = std::pin::Pin::new(&mut receive).poll(&mut Context::from_waker(&waker));
        assert!(polled.is_pending());
        // The waker of the forgotten receive stays.
        std::mem::forget(receive);
        one.disconnect().unwrap();
        ends(two).await;
    });
}

#[test]
fn a_server_of_clients_some_of_which_give_up() {
    let _alone = alone("server", 240);
    on_both(|program| async move {
        let (mut listener, address) = listen();
        let serving = program.clone();
        let server = tokio::spawn(async move {
            let mut served = tokio::task::JoinSet::new();
            loop {
                // The server gives up waiting again and again, and loses no request by that.
                let request = tokio::select! {
                    biased;
                    request = listener.next_on_tokio() => request.unwrap(),
                    Some(_) = served.join_next() => continue,
                    () = tokio::time::sleep(Duration::from_micros(200)) => continue,
                };
                let program = serving.clone();
                if request.private_data().trim_end() == b"stop" {
                    drop(request);
                    while served.join_next().await.is_some() {}
                    return;
                }
                served.spawn(async move {
                    // The peer may have given up.
                    let Ok(connection) = program.accept(request).await else { return };
                    let (connection, mut control) = connection.into_parts();
                    loop {
                        let receive = connection.receive(program.pool.take().unwrap());
                        // The next message, or the end of the connection.
                        tokio::select! {
                            message = receive => match message {
                                Ok((buffer, success)) => {
                                    let text = buffer[..success.byte_len() as usize].to_vec();
                                    let _ = program.says(&connection, &text).await;
                                }
                                Err(_) => return,
                            },
                            event = control.event_on_tokio() => {
                                event.unwrap();
                                let _ = control.disconnect();
                                return;
                            }
                        }
                    }
                });
            }
        });
        let client = |number: u64| {
            let program = program.clone();
            async move {
                let connection = program.connect(address).await.unwrap();
                for round in 0..3 {
                    let text = format!("client {number}, {round}");
                    program.says(&connection, text.as_bytes()).await.unwrap();
                    assert_eq!(program.hears(&connection).await.unwrap(), text.as_bytes());
                }
                connection.shutdown().await;
            }
        };
        for round in 0..6_u64 {
            let mut clients = tokio::task::JoinSet::new();
            for number in 0..4 {
                clients.spawn(client(number));
            }
            // This one gives up, later each time.
            let limit = Duration::from_micros(300 << round);
            let _ = timeout(limit, program.connect(address)).await;
            while let Some(ended) = clients.join_next().await {
                ended.unwrap();
            }
        }
        let route = Route::to(address).resolve_on_tokio(Instant::now() + TIME).await.unwrap();
        let prepared = program.prepare(route.port());
        let rejected = route.connect_on_tokio(prepared, b"stop").await.unwrap_err();
        assert!(matches!(rejected, ConnectionError::Rejected(_)), "{rejected}");
        server.await.unwrap();
    });
}

#[test]
fn refusals_and_time_limits_of_the_program() {
    let _alone = alone("refusals", 240);
    on_both(|program| async move {
        // The listener is gone.
        let listener = Listener::bind(here(0)).unwrap();
        let address = listener.local_addr().unwrap();
        drop(listener);
        let error = program.connect(address).await.unwrap_err();
        assert!(matches!(error, ConnectionError::Rejected(_)), "{error}");

        // The listener does not answer: the program gives up when it likes, and the peer hears of it when it
        // accepts.
        let (mut listener, address) = listen();
        let request = tokio::select! {
            _ = program.connect(address) => panic!("nobody has answered"),
            request = listener.next_on_tokio() => request.unwrap(),
        };
        match program.accept(request).await {
            Err(_) => {}
            // On iWARP the answer is sent before that is noticed.
            Ok(late) => ends(late).await,
        }

        // No client comes.
        let limit = Duration::from_millis(10);
        assert!(timeout(limit, listener.next_on_tokio()).await.is_err());
        assert!(listener.try_next().unwrap().is_none());
    });
}

/// The other side is a program that blocks.
#[test]
fn an_asynchronous_side_and_a_blocking_one() {
    let _alone = alone("mixed", 240);
    on_both(|program| async move {
        let (mut listener, address) = listen();
        let blocking = std::thread::spawn(move || {
            let (mut one, _device) = connect(address, b"").unwrap();
            one.send(Inline(b"hello")).unwrap();
            assert_eq!(one.event_until(Instant::now() + TIME).unwrap().kind(), Kind::Disconnected);
        });
        let request = listener.next_on_tokio().await.unwrap();
        let (channel, accept_later) =
            request.prepare_parts(program.prepare(1)).map_err(|(.., error)| error).unwrap();
        channel.post_receive(program.pool.take().unwrap()).unwrap();
        let mut control = accept_later.accept_on_tokio(b"").await.unwrap();
        assert_eq!(program.hears(&channel).await.unwrap(), b"hello");
        channel.shutdown().await;
        control.disconnect().unwrap();
        assert_eq!(control.event_on_tokio().await.unwrap().kind(), Kind::Disconnected);
        tokio::task::spawn_blocking(|| blocking.join().unwrap()).await.unwrap();
        drop(channel);

        let blocking = std::thread::spawn(move || {
            let request = listener.next_until(Instant::now() + TIME).unwrap();
            let device = Device::of(request.open_device().unwrap(), request.port());
            let mut region = device.domain.allocate::<u8>(LEN).unwrap();
            let room = region.slice_mut(..).unwrap();
            let (mut channel, accept) =
                request.prepare_parts(device.prepare()).map_err(|(.., error)| error).unwrap();
            let mut control = None;
            channel
                .scope(|scope| {
                    let receive = scope.post_receive(room)?;
                    control = Some(accept.accept(b"", Instant::now() + TIME).unwrap());
                    let (text, got) = receive.wait_until(std::time::Instant::now() + TIME)?;
                    assert_eq!(&text[..got.byte_len() as usize], b"hello again");
                    Ok::<_, TransportError>(())
                })
                .unwrap();
            let event = control.unwrap().event_until(Instant::now() + TIME).unwrap();
            assert_eq!(event.kind(), Kind::Disconnected);
        });
        let one = program.connect(address).await.unwrap();
        program.says(&one, b"hello again").await.unwrap();
        one.shutdown().await;
        drop(one);
        tokio::task::spawn_blocking(|| blocking.join().unwrap()).await.unwrap();
    });
}
