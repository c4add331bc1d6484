//! SRD and DC without `unsafe`: ends of loops and of reactors, on devices that are like EFA's and mlx5's.

#![forbid(unsafe_code)]

#[path = "support/patience.rs"]
mod patience;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

use ibverbs::channel::DatagramsBuilder;
use ibverbs::device::EfaCapabilities;
use ibverbs::event_loop::Ended;
use ibverbs::operation::DcDestination;
use ibverbs::queue_pair::{ConnectionSettings, SrdOptions};
use ibverbs::{
    AccessFlags, BufferPool, Channel, ChannelId, Loop, PooledBuffer, ProtectionDomain, Reactor,
    ReadWorkRequest, ReceiveWorkRequest, RemoteMemoryRegion, SendWorkRequest, SharedMemoryRegion,
    TransportError, WorkStatus, WriteWorkRequest, operation::DatagramDestination,
    settings::MaxRnrRetries,
};
use ibverbs_software::{Builder, Device, LiveObjects, Network};

use patience::deadline;

const LEN: usize = 4096;
const KEY: u64 = 0xdead_beef_0000_0007;
const ALL: EfaCapabilities = EfaCapabilities::all();
const REMOTE: AccessFlags = AccessFlags::REMOTE_READ.union(AccessFlags::REMOTE_WRITE);

type Looped = Loop<'static, PooledBuffer>;

struct Side {
    domain: Arc<ProtectionDomain<'static>>,
    pool: BufferPool,
    event_loop: Looped,
}

impl Side {
    fn new(device: &Device) -> Self {
        let context = Arc::new(device.open().unwrap());
        let domain = Arc::new(ProtectionDomain::new(&context).unwrap());
        let pool = BufferPool::new(&domain, LEN, 256, AccessFlags::empty()).unwrap();
        Self { domain, pool, event_loop: Loop::new(&context, 1024).unwrap() }
    }

    fn srd(&mut self) -> ChannelId {
        let builder = DatagramsBuilder::new(&self.domain).srd(SrdOptions::default());
        self.event_loop.add_datagrams(builder.max_send_wr(128).max_recv_wr(128)).unwrap()
    }

    fn buffer(&self, byte: u8, length: usize) -> PooledBuffer {
        self.pool.take_from(&vec![byte; length]).unwrap().unwrap()
    }

    fn receive(&mut self, on: ChannelId, count: u64) {
        for token in 0..count {
            let buffer = self.pool.take().unwrap();
            self.event_loop.post(on, ReceiveWorkRequest::new(buffer), 1000 + token).unwrap();
        }
    }

    fn window(&self, length: usize) -> SharedMemoryRegion<'static, u8> {
        SharedMemoryRegion::new(self.domain.clone(), length, REMOTE).unwrap()
    }
}

/// Takes this many of what ends, from whichever side.
fn ended<const N: usize>(
    sides: &mut [Side; N],
    counts: [usize; N],
) -> [Vec<Ended<PooledBuffer>>; N] {
    let (mut all, end) = ([(); N].map(|()| Vec::new()), deadline());
    while all.iter().zip(counts).any(|(all, count)| all.len() < count) {
        for (side, all) in sides.iter_mut().zip(&mut all) {
            all.extend(side.event_loop.next_ended().unwrap());
        }
        assert!(Instant::now() < end, "{:?} of {counts:?}", all.each_ref().map(Vec::len));
    }
    all
}

fn sides<const N: usize>(
    network: &Network,
    builder: impl Fn() -> Builder,
) -> ([Device; N], [Side; N]) {
    let devices = [(); N].map(|()| builder().network(network).build().unwrap());
    let sides = devices.each_ref().map(Side::new);
    (devices, sides)
}

fn part(of: RemoteMemoryRegion, start: usize, length: usize) -> RemoteMemoryRegion {
    of.slice(start as u64..(start + length) as u64).unwrap()
}

fn dc(to: DatagramDestination, access_key: u64) -> DcDestination {
    DcDestination { path: to.path, number: to.number, access_key }
}

fn efa() -> Builder {
    Device::builder().efa(ALL)
}

fn status(ended: &Ended<PooledBuffer>) -> Option<WorkStatus> {
    match ended.result() {
        Ok(_) => None,
        Err(TransportError::Work(error)) => Some(error.status()),
        Err(other) => panic!("{other}"),
    }
}

/// Sends, writes, writes with an immediate and reads over a bad network, in whatever order they end.
#[test]
fn an_srd_end_of_a_loop_sends_writes_and_reads() {
    const ROUNDS: usize = 24;
    let network = Network::builder().seed(11).loss(0.05).duplicate(0.1).reorder(0.2).build();
    let (devices, mut sides) = sides::<2>(&network, efa);
    let [one, other] = sides.each_mut().map(Side::srd);
    let window = sides[1].window(ROUNDS * 2 * LEN);
    let peer = sides[1].event_loop.endpoint(other).unwrap();
    let to = sides[0].event_loop.destination(one, &peer).unwrap();
    sides[1].receive(other, 2 * ROUNDS as u64);
    for n in 0..ROUNDS {
        let (byte, length) = (n as u8 + 1, 1 + n * 150);
        let message = sides[0].buffer(byte, length);
        let (first, second) = (sides[0].buffer(byte, length), sides[0].buffer(byte, length));
        let at = |n: usize| part(window.remote(), n * LEN, length);
        let own = &mut sides[0].event_loop;
        let send = SendWorkRequest::new(message).immediate(n as u32);
        let send = if length == 1 { send.inline() } else { send };
        own.send_to(one, send, &to, n as u64).unwrap();
        own.post_to(one, WriteWorkRequest::new(first, at(2 * n)), &to, 100 + n as u64).unwrap();
        let write = WriteWorkRequest::new(second, at(2 * n + 1)).immediate(1000 + n as u32);
        own.post_to(one, write, &to, 200 + n as u64).unwrap();
    }
    let [ours, theirs] = ended(&mut sides, [3 * ROUNDS, 2 * ROUNDS]);
    assert_eq!(ours.iter().find_map(status), None);
    let tokens: Vec<_> = ours.iter().map(|ended| ended.token).collect();
    assert!(!tokens.is_sorted(), "{tokens:?}");
    let mut immediates = BTreeSet::new();
    for ended in &theirs {
        let success = ended.result().unwrap();
        let immediate = success.immediate().unwrap() as usize;
        assert!(immediates.insert(immediate), "{immediate} came twice");
        if immediate < 1000 {
            assert_eq!(ended.buffer[..], vec![immediate as u8 + 1; 1 + immediate * 150]);
        }
    }
    assert_eq!(immediates.len(), 2 * ROUNDS);
    for n in 0..2 * ROUNDS {
        let mut bytes = vec![0; 1 + n / 2 * 150];
        window.read(n * LEN, &mut bytes).unwrap();
        assert!(bytes.iter().all(|&byte| byte == (n / 2 + 1) as u8), "{n}");
        let room = sides[0].buffer(0, bytes.len());
        let read = ReadWorkRequest::new(room, part(window.remote(), n * LEN, bytes.len()));
        sides[0].event_loop.post_to(one, read, &to, n as u64).unwrap();
    }
    let [reads, _] = ended(&mut sides, [2 * ROUNDS, 0]);
    for read in reads {
        read.result().unwrap();
        assert!(read.buffer.iter().all(|&byte| byte == (read.token / 2 + 1) as u8));
    }
    assert_eq!(devices[0].live_objects().address_handles, 1, "one path");
    drop((sides, window, ours, theirs));
    devices.iter().for_each(|device| assert_eq!(device.live_objects(), LiveObjects::default()));
}

/// A right that is missing and a peer that is dead cost their own operations alone; receives go on.
#[test]
fn an_srd_end_outlives_its_failures() {
    let network = Network::builder().seed(12).build();
    let (devices, mut sides) = sides::<3>(&network, efa);
    let [one, alive, dead] = sides.each_mut().map(Side::srd);
    let [to_alive, to_dead] = [(1, alive), (2, dead)].map(|(at, end)| {
        let peer = sides[at].event_loop.endpoint(end).unwrap();
        sides[0].event_loop.destination(one, &peer).unwrap()
    });
    let hidden =
        SharedMemoryRegion::<u8>::new(sides[1].domain.clone(), 64, AccessFlags::REMOTE_READ)
            .unwrap();
    devices[2].set_port_active(1, false).unwrap();
    sides[0].receive(one, 1);
    sides[1].receive(alive, 10);
    for n in 0..10 {
        let [lost, refused, sent] = [(); 3].map(|()| sides[0].buffer(7, 64));
        let own = &mut sides[0].event_loop;
        own.send_to(one, lost, &to_dead, n).unwrap();
        let write = WriteWorkRequest::new(refused, hidden.remote());
        own.post_to(one, write, &to_alive, 100 + n).unwrap();
        own.send_to(one, sent, &to_alive, 200 + n).unwrap();
    }
    let [ours, theirs, _] = ended(&mut sides, [30, 10, 0]);
    for ended in &ours {
        let expected = match ended.token {
            ..100 => Some(WorkStatus::ResponseTimeout),
            100..200 => Some(WorkStatus::RemoteAccess),
            _ => None,
        };
        assert_eq!(status(ended), expected, "{}", ended.token);
    }
    let lost = ours.iter().find(|ended| ended.token < 100).unwrap().result().unwrap_err();
    assert!(lost.to_string().contains("the peer does not answer"), "{lost}");
    assert!(theirs.iter().all(|ended| ended.result().is_ok()));
    // The receive of before the failures is there, and serves the answer.
    let back = sides[0].event_loop.endpoint(one).unwrap();
    let back = sides[1].event_loop.destination(alive, &back).unwrap();
    let answer = sides[1].buffer(9, 5);
    sides[1].event_loop.send_to(alive, answer, &back, 1).unwrap();
    let [answers, _, _] = ended(&mut sides, [1, 1, 0]);
    assert_eq!((status(&answers[0]), &answers[0].buffer[..]), (None, &[9; 5][..]));
    // Removing the end gives all buffers back.
    let last = sides[0].buffer(1, 1);
    sides[0].event_loop.send_to(one, last, &to_dead, 5).unwrap();
    sides[0].event_loop.remove(one).unwrap();
    let [left, _, _] = ended(&mut sides, [1, 0, 0]);
    assert!(left[0].result().is_err());
    drop((ours, theirs, answers, left));
    assert_eq!(sides[0].pool.available(), 256);
}

#[test]
fn what_an_end_does_not_have_is_refused_with_its_buffer() {
    let network = Network::new();
    let (_, mut sides) = sides::<1>(&network, || Device::builder().efa(EfaCapabilities::empty()));
    let end = sides[0].srd();
    let side = &mut sides[0];
    let to = side.event_loop.destination(end, &side.event_loop.endpoint(end).unwrap()).unwrap();
    let remote = RemoteMemoryRegion::new(4096, 8, 1).unwrap();
    let write = WriteWorkRequest::new(side.buffer(1, 8), remote);
    let error = side.event_loop.post_to(end, write, &to, 0).unwrap_err();
    assert!(
        error.buffer.is_some() && error.error.raw_os_error() == Some(libc::EOPNOTSUPP),
        "{error}"
    );
    let to_dc = DcDestination { path: to.path, number: to.number, access_key: 1 };
    let message = side.buffer(1, 8);
    let error = side.event_loop.send_to(end, message, &to_dc, 0).unwrap_err();
    assert!(error.buffer.is_some() && error.error.raw_os_error() == Some(libc::EINVAL), "{error}");
    // A post without a destination.
    let message = side.buffer(1, 8);
    let error = side.event_loop.post(end, SendWorkRequest::new(message), 0).unwrap_err();
    assert!(
        error.buffer.is_some() && error.error.raw_os_error() == Some(libc::EDESTADDRREQ),
        "{error}"
    );
    let wrong = DatagramDestination { number: 1 << 24, ..to };
    let message = side.buffer(1, 8);
    let error = side.event_loop.send_to(end, message, &wrong, 0).unwrap_err();
    assert!(error.buffer.is_some() && error.error.raw_os_error() == Some(libc::EINVAL), "{error}");
    assert_eq!(side.event_loop.in_flight(end), 0);
    let plain = Device::builder().network(&network).build().unwrap();
    let mut plain = Side::new(&plain);
    for builder in [
        DatagramsBuilder::new(&plain.domain).srd(SrdOptions::default()),
        DatagramsBuilder::new(&plain.domain).dc_initiator(),
    ] {
        let error = plain.event_loop.add_datagrams(builder).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EOPNOTSUPP), "{error}");
    }
}

/// An initiator turns between two targets, and a wrong key ends it and no target.
#[test]
fn dc_on_loops() {
    let network = Network::builder().seed(13).loss(0.03).reorder(0.1).build();
    let (devices, mut sides) = sides::<3>(&network, || Device::builder().mlx5());
    let targets = [1, 2].map(|n| {
        let Side { domain, event_loop, .. } = &mut sides[n];
        let receives = event_loop.add_shared_receives(&*domain, 64).unwrap();
        let builder = event_loop.create_sharing_channel(&*domain, receives).unwrap();
        let target = builder.access(REMOTE).build_dc_target(KEY + n as u64).unwrap();
        let target = event_loop.add(target).unwrap();
        sides[n].receive(receives, 20);
        target
    });
    let windows = [1, 2].map(|n| sides[n].window(LEN));
    let initiator = |side: &mut Side| {
        let builder = DatagramsBuilder::new(&side.domain).dc_initiator().max_send_wr(64);
        side.event_loop.add_datagrams(builder).unwrap()
    };
    let end = initiator(&mut sides[0]);
    let to = [1, 2].map(|n| {
        let peer = sides[n].event_loop.endpoint(targets[n - 1]).unwrap();
        dc(sides[0].event_loop.destination(end, &peer).unwrap(), KEY + n as u64)
    });
    for n in 0..10_u64 {
        let to = &to[n as usize % 2];
        let (message, data) = (sides[0].buffer(n as u8, 100), sides[0].buffer(n as u8, LEN));
        let room = sides[0].buffer(0xff, LEN);
        let own = &mut sides[0].event_loop;
        own.send_to(end, SendWorkRequest::new(message).immediate(n as u32), to, 3 * n).unwrap();
        let remote = windows[n as usize % 2].remote();
        own.post_to(end, WriteWorkRequest::new(data, remote), to, 3 * n + 1).unwrap();
        own.post_to(end, ReadWorkRequest::new(room, remote), to, 3 * n + 2).unwrap();
    }
    let [ours, first, second] = ended(&mut sides, [30, 5, 5]);
    for (n, ended) in (0_u64..).zip(&ours) {
        assert_eq!((ended.token, status(ended)), (n, None), "in the order of the posts");
        if n % 3 == 2 {
            assert!(ended.buffer.iter().all(|&byte| u64::from(byte) == n / 3));
        }
    }
    for (at, arrived) in [first, second].iter().enumerate() {
        for (n, ended) in arrived.iter().enumerate() {
            assert_eq!(ended.channel, targets[at]);
            assert_eq!(ended.result().unwrap().immediate(), Some((2 * n + at) as u32));
        }
    }
    // A wrong key fails the request, and with it the initiator.
    let wrong = DcDestination { access_key: 1, ..to[0] };
    let messages = [(); 2].map(|()| sides[0].buffer(1, 1));
    for (token, (message, to)) in (0..).zip(messages.into_iter().zip([&wrong, &to[1]])) {
        sides[0].event_loop.send_to(end, message, to, token).unwrap();
    }
    let [failed, _, _] = ended(&mut sides, [2, 0, 0]);
    assert_eq!(status(&failed[0]), Some(WorkStatus::RemoteAccess));
    assert_eq!(status(&failed[1]), Some(WorkStatus::Flushed));
    sides[0].event_loop.remove(end).unwrap();
    let end = initiator(&mut sides[0]);
    let message = sides[0].buffer(5, 1);
    sides[0].event_loop.send_to(end, message, &to[1], 9).unwrap();
    let [sent, _, arrived] = ended(&mut sides, [1, 0, 1]);
    assert_eq!((status(&sent[0]), &arrived[0].buffer[..]), (None, &[5][..]));
    let datagram = DatagramDestination { path: to[0].path, number: to[0].number, qkey: 1 };
    let message = sides[0].buffer(5, 1);
    let error = sides[0].event_loop.send_to(end, message, &datagram, 9).unwrap_err();
    assert_eq!(error.error.raw_os_error(), Some(libc::EINVAL), "{error}");
    let (domain, builder) = (&sides[0].domain, Channel::builder(&sides[0].domain));
    let error = builder.build_dc_target(1).unwrap_err();
    assert!(error.to_string().contains("create_sharing_channel"), "{error} {domain:?}");
    drop((sides, windows, failed, sent, arrived, ours));
    devices.iter().for_each(|device| assert_eq!(device.live_objects().queue_pairs, 0));
}

/// Futures of both, on tokio.
#[tokio::test]
async fn futures_of_srd_and_dc() {
    let device = |builder: Builder| {
        let device = builder.build().unwrap();
        let context = Arc::new(device.open().unwrap());
        let domain = Arc::new(ProtectionDomain::new(&context).unwrap());
        let reactor = Arc::new(Reactor::new(&context, 256).unwrap());
        let pool = BufferPool::new(&domain, LEN, 64, AccessFlags::empty()).unwrap();
        let running = reactor.clone();
        tokio::spawn(async move { running.run_on_tokio().await });
        (device, domain, reactor, pool)
    };
    let (_one, domain, reactor, pool) = device(efa());
    let buffer = |text: &[u8]| pool.take_from(text).unwrap().unwrap();
    let end = || {
        let settings =
            ConnectionSettings { max_rnr_retries: MaxRnrRetries::UNLIMITED, ..Default::default() };
        let builder = DatagramsBuilder::new(&domain).srd(SrdOptions::default());
        reactor.datagrams(builder.connection_settings(settings)).unwrap()
    };
    let (client, server) = (end(), end());
    let to = client.destination(&server.endpoint()).unwrap();
    let window = SharedMemoryRegion::<u8>::new(domain.clone(), LEN, REMOTE).unwrap();
    server.post_receive(pool.take().unwrap()).unwrap();
    server.post_receive(pool.take().unwrap()).unwrap();
    client.send_to(buffer(b"hello"), &to).await.unwrap();
    let (message, success) = server.receive(pool.take().unwrap()).await.unwrap();
    assert_eq!(
        (&message[..], success.source_queue_pair()),
        (&b"hello"[..], client.endpoint().num())
    );
    let write = WriteWorkRequest::new(buffer(b"data"), window.remote().slice(..4).unwrap());
    client.run_to(write.immediate(3), &to).await.unwrap();
    let (_, success) = server.receive(pool.take().unwrap()).await.unwrap();
    assert_eq!((success.immediate(), success.byte_len()), (Some(3), 4));
    let read = ReadWorkRequest::new(buffer(b"...."), window.remote().slice(..4).unwrap());
    let (read, _) = client.run_to(read, &to).await.unwrap();
    assert_eq!(read[..], *b"data");
    let failed = ReadWorkRequest::new(read, RemoteMemoryRegion::new(64, 4, 1).unwrap());
    assert!(client.run_to(failed, &to).await.is_err());
    client.send_to(buffer(b"on"), &to).await.unwrap();
    let error = server.recv_from(pool.take().unwrap()).await.unwrap_err();
    assert_eq!(error.error.raw_os_error(), Some(libc::EOPNOTSUPP), "{error}");

    let (_other, domain, reactor, pool) = device(Device::builder().mlx5());
    let buffer = |text: &[u8]| pool.take_from(text).unwrap().unwrap();
    let receives = reactor.add_shared_receives(&domain, 8).unwrap();
    let (target, endpoint) =
        reactor.dc_target(Channel::builder(&domain).access(REMOTE), &receives, KEY).unwrap();
    receives.post(pool.take().unwrap()).unwrap();
    let initiator = reactor.datagrams(DatagramsBuilder::new(&domain).dc_initiator()).unwrap();
    let to = dc(initiator.destination(&endpoint).unwrap(), KEY);
    initiator.send_to(buffer(b"hello"), &to).await.unwrap();
    let (message, _) = target.next_message().await.unwrap();
    assert_eq!(message[..], *b"hello");
    let window = SharedMemoryRegion::<u8>::new(domain.clone(), LEN, REMOTE).unwrap();
    let write = WriteWorkRequest::new(buffer(b"data"), window.remote().slice(..4).unwrap());
    initiator.run_to(write, &to).await.unwrap();
    let mut bytes = [0; 4];
    window.read(0, &mut bytes).unwrap();
    assert_eq!(&bytes, b"data");
}
