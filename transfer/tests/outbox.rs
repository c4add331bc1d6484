//! Posts before the connection is up, on a device of software.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use ibverbs::{
    AccessFlags, BufferPool, ChannelId, Ended, Loop, PooledBuffer, ProtectionDomain,
    ReceiveWorkRequest, SendWorkRequest, SharedMemoryRegion, TransportError, WriteWorkRequest,
};
use ibverbs_software::{Device, Verb, When};
use ibverbs_transfer::{Outbox, OutboxError};

const PATIENCE: Duration = Duration::from_secs(300);
const EIO: i32 = 5;

struct Rig {
    here: Loop<'static, PooledBuffer>,
    there: Loop<'static, PooledBuffer>,
    channel: ChannelId,
    peer: ChannelId,
    pool: BufferPool,
    domain: Arc<ProtectionDomain<'static>>,
    device: Device,
}

impl Rig {
    /// Two channels that are not connected. The peer's has receives.
    fn new(sends: u32) -> Self {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let name = format!("outbox{}", NEXT.fetch_add(1, Ordering::Relaxed));
        let device = Device::builder().name(&name).build().unwrap();
        let domain = Arc::new(ProtectionDomain::new(device.open().unwrap()).unwrap());
        let pool = BufferPool::new(&domain, 64, 32, AccessFlags::empty()).unwrap();
        let new = || Loop::<PooledBuffer>::new(domain.context_parent(), 64).unwrap();
        let (mut here, mut there) = (new(), new());
        let add = |of: &mut Loop<'static, PooledBuffer>| {
            let builder = of.create_channel(&domain).max_send_wr(sends).max_recv_wr(16);
            let prepared = builder.access(AccessFlags::REMOTE_WRITE | AccessFlags::LOCAL_WRITE);
            of.add_prepared(prepared.build().unwrap()).unwrap()
        };
        let (channel, peer) = (add(&mut here), add(&mut there));
        for token in 0..16 {
            there.post(peer, ReceiveWorkRequest::new(pool.take().unwrap()), token).unwrap();
        }
        Self { here, there, channel, peer, pool, domain, device }
    }

    fn connect(&mut self) -> Result<(), ibverbs::Error> {
        let theirs = self.there.endpoint(self.peer).unwrap();
        let ours = self.here.endpoint(self.channel).unwrap();
        self.there.handshake(self.peer, ours)?;
        self.here.handshake(self.channel, theirs)
    }

    fn buffer(&self, byte: u8) -> PooledBuffer {
        self.pool.take_from(&[byte; 4]).unwrap().unwrap()
    }

    fn post(&mut self, outbox: &mut Outbox<PooledBuffer>, byte: u8) {
        let buffer = self.buffer(byte);
        outbox.post(&mut self.here, buffer, SendWorkRequest::new, byte.into()).unwrap();
    }

    /// The receives of the peer have buffers too.
    fn out(&self) -> usize {
        self.pool.chunks() - self.pool.available() - 16
    }
}

#[track_caller]
fn next(of: &mut Loop<'static, PooledBuffer>) -> Ended<PooledBuffer> {
    of.wait_ended_until(Instant::now() + PATIENCE).unwrap().expect("something ends")
}

#[test]
fn posts_before_the_connection_are_sent_in_order_and_there_are_not_more_than_asked_for() {
    let mut rig = Rig::new(16);
    let mut outbox = Outbox::new(rig.channel, 3);
    let memory = SharedMemoryRegion::<u8>::new(&rig.domain, 4, AccessFlags::REMOTE_WRITE).unwrap();
    let remote = memory.remote();
    rig.post(&mut outbox, 0);
    let buffer = rig.buffer(1);
    let write = move |buffer| WriteWorkRequest::new(buffer, remote).immediate(1);
    outbox.post(&mut rig.here, buffer, write, 1).unwrap();
    rig.post(&mut outbox, 2);
    let buffer = rig.buffer(3);
    let refused = outbox.post(&mut rig.here, buffer, SendWorkRequest::new, 3).unwrap_err();
    assert_eq!((refused.error, refused.token), (OutboxError::Full { most: 3 }, 3));
    assert_eq!(&refused.buffer.as_ref().unwrap()[..], &[3; 4]);
    assert!(refused.to_string().contains("keeps 3 posts"));
    drop(refused);
    assert_eq!((outbox.kept(), rig.here.in_flight(rig.channel)), (3, 0));

    rig.connect().unwrap();
    assert!(outbox.connected(&mut rig.here).is_empty());
    rig.post(&mut outbox, 4);
    assert_eq!(outbox.kept(), 0);
    for token in [0, 1, 2, 4] {
        let ended = next(&mut rig.here);
        assert_eq!(ended.token, token);
        ended.result().unwrap();
        let arrived = next(&mut rig.there);
        let immediate = arrived.result().unwrap().immediate();
        assert_eq!(immediate, (token == 1).then_some(1));
        if token != 1 {
            assert_eq!(arrived.buffer[..], [token as u8; 4]);
        }
    }
    assert_eq!(memory.as_slice().read_one(3), Ok(1));
}

#[test]
fn what_was_kept_ends_with_the_reason_if_connecting_fails_or_is_cancelled() {
    for cancelled in [false, true] {
        let mut rig = Rig::new(16);
        let mut outbox = Outbox::new(rig.channel, 8);
        (0..3).for_each(|byte| rig.post(&mut outbox, byte));
        let reason = if cancelled {
            TransportError::Cancelled
        } else {
            rig.device.fail(Verb::ModifyQp, EIO, When::Before, 1);
            TransportError::from(rig.connect().unwrap_err())
        };
        let unposted = outbox.end(reason);
        let tokens: Vec<_> = unposted.iter().map(|unposted| unposted.token).collect();
        assert_eq!(tokens, [0, 1, 2]);
        for unposted in &unposted {
            assert_eq!(unposted.error, OutboxError::Ended(reason));
            assert_eq!(unposted.buffer.as_ref().unwrap()[0], unposted.token as u8);
        }
        let buffer = rig.buffer(9);
        let late = outbox.post(&mut rig.here, buffer, SendWorkRequest::new, 9).unwrap_err();
        assert_eq!(late.error, OutboxError::Ended(reason));
        assert!(outbox.connected(&mut rig.here).is_empty());
        drop((unposted, late));
        assert_eq!(rig.out(), 0);
    }
}

#[test]
fn a_full_queue_is_waited_for_and_nothing_overtakes() {
    let mut rig = Rig::new(2);
    let mut outbox = Outbox::new(rig.channel, 8);
    (0..5).for_each(|byte| rig.post(&mut outbox, byte));
    rig.connect().unwrap();
    assert!(outbox.connected(&mut rig.here).is_empty());
    assert_eq!(outbox.kept(), 3, "two are in the queue");
    rig.post(&mut outbox, 5);
    assert_eq!(outbox.kept(), 4);
    for token in 0..7 {
        let ended = next(&mut rig.here);
        assert_eq!(ended.token, token);
        ended.result().unwrap();
        if token == 0 {
            // The queue has room, but others come first.
            rig.post(&mut outbox, 6);
        }
        assert_eq!(next(&mut rig.there).buffer[..], [token as u8; 4]);
        assert!(outbox.flush(&mut rig.here).is_empty());
    }
    assert_eq!(outbox.kept(), 0);
    // Connected, and the queue is full.
    (0..4).for_each(|byte| rig.post(&mut outbox, byte));
    assert_eq!(outbox.kept(), 2);
}

#[test]
fn buffers_come_back_from_a_peer_that_is_dead() {
    let mut rig = Rig::new(2);
    let mut outbox = Outbox::new(rig.channel, 8);
    (0..5).for_each(|byte| rig.post(&mut outbox, byte));
    rig.connect().unwrap();
    rig.there.remove(rig.peer).unwrap();
    while let Ok(Some(_)) = rig.there.next_ended() {}
    assert!(outbox.connected(&mut rig.here).is_empty());
    for token in 0..5 {
        let ended = next(&mut rig.here);
        assert_eq!(ended.token, token);
        assert!(ended.result().is_err());
        assert!(outbox.flush(&mut rig.here).is_empty());
    }
    assert_eq!(rig.pool.available(), rig.pool.chunks());
    // The channel goes, and what is kept is refused by the loop.
    (5..9).for_each(|byte| rig.post(&mut outbox, byte));
    rig.here.remove(rig.channel).unwrap();
    for token in 5..7 {
        assert_eq!(next(&mut rig.here).token, token);
    }
    let unposted = outbox.flush(&mut rig.here);
    let closed = OutboxError::Refused(TransportError::Closed);
    assert!(unposted.iter().all(|unposted| unposted.error == closed && unposted.buffer.is_some()));
    assert_eq!(unposted.len(), 2);
    drop(unposted);
    assert_eq!(rig.pool.available(), rig.pool.chunks());
}

#[test]
fn a_dropped_outbox_drops_its_buffers() {
    let mut rig = Rig::new(2);
    let mut outbox = Outbox::new(rig.channel, 8);
    (0..5).for_each(|byte| rig.post(&mut outbox, byte));
    assert_eq!(rig.out(), 5);
    drop(outbox);
    assert_eq!(rig.out(), 0);
}
