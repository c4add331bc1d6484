//! Connecting over TCP, and connecting again while the peer of the last connection still sends.

#[path = "support/patience.rs"]
mod patience;

use std::net::TcpListener;
use std::thread;

use ibverbs::{
    AccessFlags, Channel, Inline, PreparedChannel, ProtectionDomain, RemoteMemoryRegion,
    TransportError, settings::MaxRnrRetries,
};
use ibverbs_software::Device;

use patience::deadline;

fn prepare<'a>(domain: &'a ProtectionDomain<'a>) -> PreparedChannel<'a> {
    domain.create_channel().max_rnr_retries(MaxRnrRetries::UNLIMITED).build().unwrap()
}

fn shake_hands<'a>(one: PreparedChannel<'a>, other: PreparedChannel<'a>) -> [Channel<'a>; 2] {
    let endpoints = (one.endpoint(), other.endpoint());
    [one.handshake(endpoints.1).unwrap(), other.handshake(endpoints.0).unwrap()]
}

#[test]
fn two_sides_connect_over_tcp_and_notice_when_the_other_is_gone() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let server = thread::spawn(move || {
        let context = Device::new().unwrap().open().unwrap();
        let domain = context.alloc_pd().unwrap();
        let access = AccessFlags::REMOTE_WRITE | AccessFlags::LOCAL_WRITE;
        let target = domain.allocate_shared::<u64>(4, access).unwrap();
        let prepared = domain.create_channel().access(access).build().unwrap();
        let region = target.remote().to_bytes();
        let (mut channel, name) = prepared.accept(&listener, &region, deadline()).unwrap();
        assert_eq!(name, b"client");
        let mut inbox = domain.allocate::<u8>(8).unwrap();
        let received = channel.until(deadline()).receive(inbox.slice_mut(..).unwrap()).unwrap();
        assert_eq!((received.byte_len(), &inbox[..4]), (4, &b"done"[..]));
        assert_eq!(target.read_one(2).unwrap(), 77);
        assert!(channel.wait_until_peer_is_gone(deadline()).unwrap());
    });
    let context = Device::new().unwrap().open().unwrap();
    let domain = context.alloc_pd().unwrap();
    let prepared = domain.create_channel().max_inline_data(16);
    let prepared = prepared.max_rnr_retries(MaxRnrRetries::UNLIMITED).build().unwrap();
    let (mut channel, region) = prepared.connect(address, b"client", deadline()).unwrap();
    let remote = RemoteMemoryRegion::from_bytes(&region).unwrap();
    assert!(!channel.peer_is_gone().unwrap());
    let mut value = domain.allocate::<u64>(1).unwrap();
    value[0] = 77;
    let word = remote.sub_region(16, 8).unwrap();
    channel.until(deadline()).write(value.slice(..).unwrap(), word).unwrap();
    channel.until(deadline()).send(Inline(b"done")).unwrap();
    drop(channel);
    server.join().unwrap();
}

/// `b` leaves `old`, which goes on repeating a message, and connects to `new`: it gets the messages of
/// `new`, all of them, and none of `old`.
#[test]
fn a_message_of_the_old_peer_does_not_reach_the_next_connection() {
    let contexts = [(); 2].map(|()| Device::new().unwrap().open().unwrap());
    let domains = contexts.each_ref().map(|context| context.alloc_pd().unwrap());
    let [b, mut old] = shake_hands(prepare(&domains[0]), prepare(&domains[1]));
    let prepared = b.reset().unwrap();
    let (mut stale, mut fresh) =
        (domains[1].allocate::<u64>(1).unwrap(), domains[1].allocate::<u64>(1).unwrap());
    let mut inbox = domains[0].allocate::<u64>(1).unwrap();
    stale[0] = 0xdead;
    thread::scope(|threads| {
        let repeating = threads.spawn(move || old.until(deadline()).send(stale.slice(..).unwrap()));
        let [mut b, mut new] = shake_hands(prepared, prepare(&domains[1]));
        threads.spawn(move || {
            for number in 1..=20 {
                fresh[0] = number;
                new.until(deadline()).send(fresh.slice(..).unwrap()).unwrap();
            }
        });
        for number in 1..=20 {
            b.until(deadline()).receive(inbox.slice_mut(..).unwrap()).unwrap();
            assert_eq!(inbox[0], number, "a message of another connection");
        }
        let outcome = repeating.join().unwrap();
        assert!(matches!(outcome, Err(TransportError::Work(_))), "{outcome:?}");
    });
}
