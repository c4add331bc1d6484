//! Connecting over TCP on Soft-RoCE: `connect` and `accept` of channels and queue pairs, and the errors of
//! sides that cannot reach each other. `script/test rxe` runs it in the machine that `script/vm` starts.

#[path = "support/vm/mod.rs"]
mod vm;

use std::net::{SocketAddr, TcpListener};
use std::thread;
use std::time::Instant;

use ibverbs::device::GidType;
use ibverbs::tcp::{ExchangeError, MAX_PRIVATE_DATA, peer_has_closed, wait_until_peer_closes};
use ibverbs::{ErrorKind, QueuePairEndpoint, Rc};

use vm::channels::{Side, deadline, exchange, nothing_is_left, sides};
use vm::{alone, assert_nothing_left, completions, success};

fn listen() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    (listener, address)
}

#[test]
fn channels_are_ready_and_hear_of_the_end() {
    let _alone = alone("channels", 240);
    let sides = sides();
    let (listener, address) = listen();
    let data = vec![7; MAX_PRIVATE_DATA];
    for ends in 0..2 {
        let (one, two) = (sides.0.builder().build().unwrap(), sides.1.builder().build().unwrap());
        let (mut one, mut two) = thread::scope(|threads| {
            let client = threads.spawn(|| two.connect(address, &data, deadline()).unwrap());
            let (one, told) = one.accept(&listener, b"welcome", deadline()).unwrap();
            assert_eq!(told, data);
            let (two, told) = client.join().unwrap();
            assert_eq!(told, b"welcome");
            (one, two)
        });
        for _ in 0..10 {
            exchange(&sides, &mut one, &mut two);
        }
        let (first, second) = if ends == 0 { (one, two) } else { (two, one) };
        assert!(!second.peer_is_gone().unwrap());
        drop(first);
        assert!(second.wait_until_peer_is_gone(deadline()).unwrap());
    }
    nothing_is_left(sides);
}

#[test]
fn queue_pairs_are_ready_and_the_stream_is_handed_out() {
    let _alone = alone("queue pairs", 120);
    {
        let sides = ["rxe0", "rxe1"].map(|name| ibverbs::open(name).unwrap());
        let domains = sides.each_ref().map(|context| context.alloc_pd().unwrap());
        let queues = sides.each_ref().map(|context| context.create_cq(8).unwrap());
        let prepare = |side: usize| {
            let queue = &queues[side];
            domains[side].create_qp(queue, queue, Rc).build().unwrap()
        };
        let (listener, address) = listen();
        let (one, two) = (prepare(0), prepare(1));
        let ((mut one, .., here), (mut two, .., there)) = thread::scope(|threads| {
            let client = threads.spawn(|| two.connect(address, b"", deadline()).unwrap());
            (one.accept(&listener, b"", deadline()).unwrap(), client.join().unwrap())
        });
        let mut room = domains[1].allocate::<u8>(8).unwrap();
        let mut message = domains[0].allocate::<u8>(8).unwrap();
        message.copy_from_slice(b"over TCP");
        // SAFETY: the regions are used again when the completions were polled.
        unsafe {
            two.post_receive(&mut room, .., 2).unwrap();
            one.post_send(&message, .., 1).unwrap();
        }
        success(&completions(&queues[0], 1), 1);
        success(&completions(&queues[1], 1), 2);
        assert_eq!(&room[..], b"over TCP");
        assert!(!peer_has_closed(&here).unwrap());
        drop(there);
        assert!(wait_until_peer_closes(&here, deadline()).unwrap());
        drop((one, two));
    }
    assert_nothing_left("rxe0");
    assert_nothing_left("rxe1");
}

/// The index of the link-local GID, and of that of the IPv4 address.
fn indices(side: &Side) -> (u8, u8) {
    let table = side.context.gid_table().unwrap();
    let find = |local: bool| {
        let entry = table.iter().find(|entry| {
            entry.gid_type == GidType::RoceV2
                && if local { entry.gid.is_link_local() } else { entry.gid.to_ipv4().is_some() }
        });
        entry.unwrap().index.try_into().unwrap()
    };
    (find(true), find(false))
}

#[test]
#[ignore = "Soft-RoCE: the GIDs of a network interface"]
fn sides_of_two_address_families_are_told_both_gids() {
    let _alone = alone("families", 120);
    let sides = sides();
    let (local, ipv4) = (indices(&sides.0).0, indices(&sides.1).1);
    let one = sides.0.builder().gid_index(local).build().unwrap();
    let two = sides.1.builder().gid_index(ipv4).build().unwrap();
    let gids = [one.endpoint().gid(), two.endpoint().gid()];
    let (listener, address) = listen();
    thread::scope(|threads| {
        let client = threads.spawn(|| two.connect(address, b"", deadline()).err().unwrap());
        let server = one.accept(&listener, b"", deadline()).err().unwrap();
        for (ours, failed) in [server.error, client.join().unwrap().error].into_iter().enumerate() {
            let ExchangeError::Verbs(error) = failed else { panic!("{failed}") };
            assert_eq!(error.raw_os_error(), Some(libc::EADDRNOTAVAIL));
            let text = error.to_string();
            assert!(gids.iter().all(|gid| text.contains(&gid.to_string())), "{ours}: {text}");
        }
    });
    nothing_is_left(sides);
}

/// No machine has the address behind the peer's GID, or no network leads there.
#[test]
#[ignore = "Soft-RoCE: the GIDs and the neighbours of a network interface"]
fn an_unreachable_peer_is_named_with_our_gid_and_its_index() {
    let _alone = alone("unreachable", 120);
    let sides = sides();
    let index = indices(&sides.0).1;
    for gid in ["::ffff:10.77.0.99", "::ffff:203.0.113.5"] {
        let prepared = sides.0.builder().gid_index(index).build().unwrap();
        let ours = prepared.endpoint().gid();
        let remote = QueuePairEndpoint::new(0x17, 0, gid.parse().unwrap()).unwrap();
        let start = Instant::now();
        let error = prepared.handshake(remote).err().unwrap().error;
        assert!(start.elapsed() < vm::PATIENCE);
        assert!(
            matches!(error.kind(), ErrorKind::Unreachable | ErrorKind::TimedOut),
            "{gid}: {error}"
        );
        let text = error.to_string();
        let path = format!("from our GID {ours} (index {index}) to the peer's GID {gid}");
        assert!(text.contains(&path), "{text}");
    }
    nothing_is_left(sides);
}
