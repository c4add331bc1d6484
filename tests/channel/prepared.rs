//! Receives that are posted before the channel is connected.

use std::sync::Arc;

use ibverbs::{
    AccessFlags, BufferPool, ErrorKind, Inline, PreparedChannel, ProtectionDomain,
    ReceiveWorkRequest, TransportError,
};
use ibverbs_software::Verb;

use crate::pair::{Pair, builder, domain};
use crate::software::Software;

const CHUNKS: usize = 8;

struct Rig {
    device: Software,
    domain: Arc<ProtectionDomain<'static>>,
    pool: BufferPool,
}

impl Rig {
    fn new() -> Self {
        let device = Software::new();
        let domain = domain(&device);
        let pool = BufferPool::new(&domain, 16, CHUNKS, AccessFlags::empty()).unwrap();
        Self { device, domain, pool }
    }

    fn prepared(&self) -> PreparedChannel<'static> {
        builder(&self.domain).build().unwrap()
    }

    fn finish(self) {
        let Self { device, domain, pool } = self;
        assert_eq!(pool.available(), CHUNKS, "each buffer is back");
        drop((pool, domain));
        device.assert_clean();
    }
}

#[test]
fn the_first_messages_find_their_receives() {
    let rig = Rig::new();
    let (mut one, two) = (rig.prepared(), rig.prepared());
    let endpoint = one.endpoint();
    let mut receives: Vec<_> = (0..4)
        .map(|_| one.post_owned(ReceiveWorkRequest::new(rig.pool.take().unwrap())).unwrap())
        .collect();
    assert_eq!(one.endpoint(), endpoint);
    assert_eq!(rig.device.outstanding(endpoint.num()), Some((0, 4)));
    let full = one.post_owned(ReceiveWorkRequest::new(rig.pool.take().unwrap())).unwrap_err();
    assert_eq!(full.error, TransportError::QueueFull);
    drop(full);
    // The peer is ready first, and sends at once.
    let mut two = two.handshake(endpoint).unwrap();
    let endpoint = two.endpoint();
    let mut one = one.handshake(endpoint).unwrap();
    for number in 0..4 {
        two.send(Inline(&[number; 3])).unwrap();
    }
    for (receive, number) in receives.iter_mut().zip(0..) {
        let (buffer, success) = receive.wait(&mut one).unwrap();
        assert_eq!((success.byte_len(), buffer[0]), (3, number));
    }
    drop(receives);
    // From now on the channel works like any other.
    let Rig { device, domain, pool } = rig;
    let mut pair = Pair { one, two, domain: domain.clone(), device: device.clone() };
    pair.exchange();
    drop((pair.one, pair.two, pair.domain, pair.device));
    Rig { device, domain, pool }.finish();
}

#[test]
fn a_channel_that_is_dropped_gives_its_buffers_back() {
    let rig = Rig::new();
    for closed in [false, true] {
        let mut prepared = rig.prepared();
        let receives = [(); 2].map(|()| {
            prepared.post_owned(ReceiveWorkRequest::new(rig.pool.take().unwrap())).unwrap()
        });
        assert_eq!(rig.pool.available(), CHUNKS - 2);
        if closed {
            prepared.close().unwrap();
        } else {
            drop(prepared);
        }
        assert_eq!((rig.pool.available(), rig.device.live_objects().queue_pairs), (CHUNKS, 0));
        drop(receives);
    }
    rig.finish();
}

/// A handle that is forgotten, or outlives its channel, delays nothing and leaks nothing.
#[test]
fn forgotten_handles_leak_nothing() {
    let rig = Rig::new();
    let mut prepared = rig.prepared();
    std::mem::forget(
        prepared.post_owned(ReceiveWorkRequest::new(rig.pool.take().unwrap())).unwrap(),
    );
    drop(prepared.post_owned(ReceiveWorkRequest::new(rig.pool.take().unwrap())).unwrap());
    let endpoint = prepared.endpoint();
    let mut channel = prepared.handshake(endpoint).unwrap();
    channel.send(Inline(b"to itself")).unwrap();
    channel.send(Inline(b"to itself")).unwrap();
    channel.poll().unwrap();
    drop(channel);
    rig.finish();
}

/// Neither reset nor destroyed: the device may still write the buffers, which are leaked.
#[test]
fn buffers_of_a_queue_pair_that_cannot_be_destroyed_are_leaked() {
    let Rig { device, domain, pool } = Rig::new();
    let mut prepared = builder(&domain).build().unwrap();
    let receive = prepared.post_owned(ReceiveWorkRequest::new(pool.take().unwrap())).unwrap();
    device.fail_always(Verb::ModifyQp, libc::EIO);
    device.fail_always(Verb::DestroyQp, libc::EIO);
    drop(prepared);
    assert_eq!(pool.available(), CHUNKS - 1);
    drop((receive, pool));
    device.clear_failures();
    assert_eq!(device.early_deregistrations(), 0);
}

#[test]
fn a_failed_handshake_ends_the_receives_and_the_next_starts_again() {
    let rig = Rig::new();
    // The first step has been made, so two are left.
    for step in 0..2 {
        let (mut one, two) = (rig.prepared(), rig.prepared());
        let mut early = one.post_owned(ReceiveWorkRequest::new(rig.pool.take().unwrap())).unwrap();
        let (to_one, to_two) = (one.endpoint(), two.endpoint());
        rig.device.let_pass(Verb::ModifyQp, step);
        rig.device.fail_next(Verb::ModifyQp, libc::ENETUNREACH);
        let failed = one.handshake(to_two).unwrap_err();
        assert_eq!(failed.error.raw_os_error(), Some(libc::ENETUNREACH));
        assert_eq!(rig.pool.available(), CHUNKS, "its buffer is back");
        let mut one = failed.object;
        let mut again = one.post_owned(ReceiveWorkRequest::new(rig.pool.take().unwrap())).unwrap();
        let (mut one, mut two) = (one.handshake(to_two).unwrap(), two.handshake(to_one).unwrap());
        two.send(Inline(b"first")).unwrap();
        assert_eq!(&again.wait(&mut one).unwrap().0[..5], b"first");
        assert_eq!(early.poll(&mut one).unwrap_err().error, TransportError::Stopped);
        drop((one, two, early, again));
    }
    rig.finish();
}

#[test]
fn a_queue_pair_that_does_not_reach_init_takes_no_receive() {
    let rig = Rig::new();
    let mut prepared = rig.prepared();
    rig.device.fail_next(Verb::ModifyQp, libc::ENOMEM);
    let refused =
        prepared.post_owned(ReceiveWorkRequest::new(rig.pool.take().unwrap())).unwrap_err();
    let TransportError::Verbs(error) = refused.error else { panic!("{refused}") };
    assert_eq!(error.kind(), ErrorKind::Resource);
    drop(refused.buffer);
    let receive = prepared.post_owned(ReceiveWorkRequest::new(rig.pool.take().unwrap())).unwrap();
    drop((prepared, receive));
    rig.finish();
}
