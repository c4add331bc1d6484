//! Reliable connections between two devices of this process, over UDP on loopback.

#[path = "support/patience.rs"]
mod patience;
#[path = "support/two_devices.rs"]
mod two_devices;

use std::net::TcpListener;
use std::time::Instant;

use ibverbs::{
    AccessFlags, Channel, CompareSwapWorkRequest, CompletionQueue, FetchAddWorkRequest,
    ProtectionDomain, QueuePair, Rc, RemoteMemoryRegion, TransportError, WorkCompletion,
    settings::MaxRnrRetries,
};
use ibverbs_software::Device;

use patience::{PATIENCE, deadline};
use two_devices::{channels, contexts};

#[test]
fn hello_goes_from_a_channel_to_itself() {
    let device = Device::builder().name("hello").build().unwrap();
    device.register();
    let devices = ibverbs::devices().unwrap();
    let listed = devices.iter().find(|device| device.name() == "hello").unwrap();
    let context = listed.open().unwrap();
    assert_eq!(context.query_pkey(1, 0).unwrap(), 0xffff);
    let domain = context.alloc_pd().unwrap();
    let prepared = domain.create_channel().build().unwrap();
    let remote = prepared.endpoint();
    let mut channel = prepared.handshake(remote).unwrap();
    let mut region = domain.allocate::<u8>(64).unwrap();
    region[..12].copy_from_slice(b"hello, RDMA!");
    let (greeting, room) = region.slice_mut(..).unwrap().split_at(12).unwrap();
    channel
        .scope(|scope| {
            let receive = scope.post_receive(room)?;
            scope.post_send(greeting)?.wait()?;
            let (message, completion) = receive.wait()?;
            assert_eq!(&message[..completion.byte_len() as usize], b"hello, RDMA!");
            Ok::<(), ibverbs::TransportError>(())
        })
        .unwrap();
    drop(channel);
    drop(device);
    assert!(ibverbs::open("hello").is_err(), "it is not registered any more");
}

/// The example of `Channel`: after connecting, both sides do the same.
fn greet<'a>(domain: &'a ProtectionDomain<'a>, mut channel: Channel<'a>) {
    let mut region = domain.allocate::<u8>(4096).unwrap();
    region[..5].copy_from_slice(b"hello");
    let (message, room) = region.slice_mut(..).unwrap().split_at(5).unwrap();
    channel
        .scope_until(deadline(), |scope| {
            let receive = scope.post_receive(room)?;
            scope.post_send(message)?.wait()?;
            let (room, completion) = receive.wait()?;
            assert_eq!(&room[..completion.byte_len() as usize], b"hello");
            Ok::<_, TransportError>(())
        })
        .unwrap();
}

#[test]
fn both_sides_can_run_the_same_program() {
    let contexts = contexts(false);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::scope(|threads| {
        let [one, other] = &contexts;
        threads.spawn(|| {
            let domain = one.alloc_pd().unwrap();
            let builder = domain.create_channel().max_rnr_retries(MaxRnrRetries::UNLIMITED);
            let (channel, _) = builder.build().unwrap().accept(&listener, b"", deadline()).unwrap();
            greet(&domain, channel);
        });
        let domain = other.alloc_pd().unwrap();
        let builder = domain.create_channel().max_rnr_retries(MaxRnrRetries::UNLIMITED);
        let (channel, _) = builder.build().unwrap().connect(address, b"", deadline()).unwrap();
        greet(&domain, channel);
    });
}

#[test]
fn messages_of_all_lengths_arrive_whole() {
    let contexts = contexts(false);
    let domains = contexts.each_ref().map(|context| context.alloc_pd().unwrap());
    let [mut one, mut other] = channels(&domains[0], &domains[1]);
    for length in [0, 1, 3, 4095, 4096, 4097, 8192, 100_000, 1 << 20] {
        let mut from = domains[0].allocate::<u8>(length.max(1)).unwrap();
        let mut to = domains[1].allocate::<u8>(length + 16).unwrap();
        for (i, byte) in from.iter_mut().enumerate() {
            *byte = (i * 31 + i / 4096 + length) as u8;
        }
        std::thread::scope(|scope| {
            let (to, other) = (&mut to, &mut other);
            let receiver = scope.spawn(move || {
                let done = other.until(deadline()).receive(to.slice_mut(..).unwrap());
                done.unwrap().byte_len() as usize
            });
            one.until(deadline()).send(from.slice(..length).unwrap()).unwrap();
            assert_eq!(receiver.join().unwrap(), length);
        });
        assert!(to[..length] == from[..length], "{length}");
        assert_eq!(to[length..], [0; 16]);
    }
}

#[test]
fn memory_is_written_read_and_changed_from_afar() {
    let contexts = contexts(false);
    let domains = contexts.each_ref().map(|context| context.alloc_pd().unwrap());
    let [mut one, _other] = channels(&domains[0], &domains[1]);
    const LENGTH: usize = 100_000;
    let access = AccessFlags::REMOTE_READ | AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_ATOMIC;
    let shared = domains[1].allocate_shared::<u64>(LENGTH, access).unwrap();
    let mut region = domains[0].allocate::<u64>(LENGTH).unwrap();
    for (i, number) in region.iter_mut().enumerate() {
        *number = (i as u64) << 20 | 7;
    }
    let remote: RemoteMemoryRegion = shared.remote();
    one.until(deadline()).write(region.slice(..).unwrap(), remote).unwrap();
    assert_eq!(shared.to_vec(), region[..]);
    region.fill(0);
    one.until(deadline()).read(&mut region.slice_mut(..).unwrap(), remote).unwrap();
    assert_eq!(shared.to_vec(), region[..]);

    let mut result = domains[0].allocate::<u64>(1).unwrap();
    let third = shared.remote_range(3..4).unwrap();
    one.until(deadline())
        .run(FetchAddWorkRequest::new(&mut result.slice_mut(..).unwrap(), third, 5))
        .unwrap();
    assert_eq!((result[0], shared.read_one(3).unwrap()), (3 << 20 | 7, (3 << 20 | 7) + 5));
    let expected = shared.read_one(3).unwrap();
    let mut slice = result.slice_mut(..).unwrap();
    one.until(deadline())
        .run(CompareSwapWorkRequest::new(&mut slice, third, expected, 99))
        .unwrap();
    assert_eq!(shared.read_one(3).unwrap(), 99);
    one.until(deadline())
        .run(CompareSwapWorkRequest::new(&mut slice, third, expected, 100))
        .unwrap();
    assert_eq!((result[0], shared.read_one(3).unwrap()), (99, 99));
}

/// Waits for that many completions.
fn completions(queue: &CompletionQueue<'_>, count: usize) -> Vec<WorkCompletion> {
    let (start, mut all) = (Instant::now(), Vec::new());
    let mut slots = [WorkCompletion::default(); 16];
    while all.len() < count {
        assert!(start.elapsed() < PATIENCE, "{all:?}");
        all.extend_from_slice(queue.poll(&mut slots).unwrap());
        std::thread::yield_now();
    }
    all
}

#[test]
fn queue_pairs_of_two_devices_talk_in_lists() {
    let contexts = contexts(false);
    let domains = contexts.each_ref().map(|context| context.alloc_pd().unwrap());
    let queues = contexts.each_ref().map(|context| context.create_cq(64).unwrap());
    let prepare = |i: usize| {
        let (domain, queue) = (&domains[i], &queues[i]);
        let kind = Rc;
        domain.create_qp(queue, queue, kind).max_send_wr(32).max_recv_wr(32).build().unwrap()
    };
    let (one, other) = (prepare(0), prepare(1));
    let endpoints = (one.endpoint(), other.endpoint());
    let mut one: QueuePair<'_> = one.handshake(endpoints.1).unwrap();
    let mut other: QueuePair<'_> = other.handshake(endpoints.0).unwrap();
    let mut from = domains[0].allocate::<u32>(32).unwrap();
    let mut to = domains[1].allocate::<u32>(32).unwrap();
    for (i, number) in from.iter_mut().enumerate() {
        *number = i as u32 + 1000;
    }
    // SAFETY: the regions live until all completions have come.
    unsafe {
        for i in 0..32 {
            other.post_receive(&mut to, i..=i, i as u64).unwrap();
        }
        for i in 0..32 {
            one.post_send(&from, i..=i, i as u64).unwrap();
        }
    }
    let received = completions(&queues[1], 32);
    let sent = completions(&queues[0], 32);
    for (i, (sent, received)) in sent.iter().zip(&received).enumerate() {
        assert_eq!((sent.wr_id(), received.wr_id()), (i as u64, i as u64));
        assert!(sent.is_success() && received.is_success(), "{sent:?} {received:?}");
    }
    assert!(to[..] == from[..]);
}

#[test]
fn a_peer_that_is_not_there_is_given_up() {
    let contexts = contexts(false);
    let domains = contexts.each_ref().map(|context| context.alloc_pd().unwrap());
    let prepare = |i: usize| {
        let builder = domains[i].create_channel();
        let timeout = ibverbs::settings::AckTimeout::new(1).unwrap();
        builder
            .ack_timeout(timeout)
            .max_ack_retries(ibverbs::settings::MaxAckRetries::new(2).unwrap())
    };
    let (one, other) = (prepare(0).build().unwrap(), prepare(1).build().unwrap());
    let endpoints = (one.endpoint(), other.endpoint());
    let mut one = one.handshake(endpoints.1).unwrap();
    drop(other);
    let region = domains[0].allocate::<u8>(8).unwrap();
    let error = one.until(deadline()).send(region.slice(..).unwrap()).unwrap_err();
    assert!(
        format!("{error:?}").contains("RetryExceeded") || format!("{error}").contains("retr"),
        "{error:?}"
    );
}
