//! Loops: many channels on one table, whose operations own their buffers.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use ibverbs::channel::AnyBuffer;
use ibverbs::event_loop::LoopBuffer;
use ibverbs::{
    AccessFlags, BufferPool, Channel, ChannelBuilder, ChannelId, Ended, ErrorKind, Inline, Loop,
    PooledBuffer, ProtectionDomain, ReceiveWorkRequest, SendWorkRequest, TransportError,
    WriteWorkRequest, completion::WorkErrorClass,
};
use ibverbs_function_device::{FunctionDevice, Progress};

use crate::pair::{ALL, TestDevice, domain};
use crate::software::Software;

pub(crate) const LEN: usize = 16;

/// A loop with channels that are connected to channels of their own loop, `peers`.
pub(crate) struct Loops<D, B = PooledBuffer> {
    pub(crate) here: Loop<'static, B>,
    pub(crate) peers: Loop<'static, PooledBuffer>,
    pub(crate) pool: BufferPool,
    pub(crate) domain: Arc<ProtectionDomain<'static>>,
    pub(crate) device: D,
}

impl<D: TestDevice> Loops<D> {
    pub(crate) fn on(device: D) -> Self {
        Self::with(device)
    }
}

impl<D: TestDevice, B> Loops<D, B>
where
    PooledBuffer: LoopBuffer<B>,
{
    fn with(device: D) -> Self {
        let domain = domain(&device);
        let pool = BufferPool::new(&domain, LEN, 64, AccessFlags::empty()).unwrap();
        let here = Loop::new(domain.context_parent(), 64).unwrap();
        let peers = Loop::new(domain.context_parent(), 64).unwrap();
        Self { here, peers, pool, domain, device }
    }

    pub(crate) fn prepare<O>(&self, owner: &Loop<'static, O>) -> ChannelBuilder<'static> {
        owner
            .create_channel(&self.domain)
            .max_send_wr(4)
            .max_recv_wr(4)
            .max_inline_data(32)
            .access(ALL)
            .settle_timeout(Duration::from_millis(20))
    }

    /// Two channels that are connected to each other.
    pub(crate) fn connect(&mut self) -> (ChannelId, ChannelId) {
        let (one, two) = crate::pair::connect(self.prepare(&self.here), self.prepare(&self.peers));
        (self.here.add(one).unwrap(), self.peers.add(two).unwrap())
    }

    pub(crate) fn filled(&self, byte: u8) -> PooledBuffer {
        self.pool.take_from(&[byte; LEN]).unwrap().unwrap()
    }

    pub(crate) fn receive(&mut self, peer: ChannelId, token: u64) {
        let buffer = self.filled(0);
        self.peers.post(peer, ReceiveWorkRequest::new(buffer), token).unwrap();
    }

    pub(crate) fn send(&mut self, channel: ChannelId, byte: u8, token: u64) {
        let buffer = self.filled(byte);
        self.here.post(channel, SendWorkRequest::new(buffer), token).unwrap();
    }

    /// How many buffers are not in the pool.
    pub(crate) fn out(&self) -> usize {
        self.pool.chunks() - self.pool.available()
    }

    #[track_caller]
    pub(crate) fn finish(self) {
        let Self { here, peers, pool, domain, device } = self;
        drop((here, peers));
        assert_eq!(pool.available(), pool.chunks());
        drop((pool, domain));
        device.assert_clean();
    }
}

/// Polls until an operation ends.
#[track_caller]
pub(crate) fn next<B>(of: &mut Loop<'static, B>) -> Ended<B> {
    for _ in 0..100_000 {
        if let Some(ended) = of.next_ended().unwrap() {
            return ended;
        }
    }
    panic!("nothing ends")
}

fn tokens(of: &mut Loop<'static, PooledBuffer>, count: usize) -> Vec<u64> {
    (0..count).map(|_| next(of).token).collect()
}

#[test]
fn what_ends_comes_with_its_channel_token_and_buffer() {
    let mut loops = Loops::on(Software::new());
    let pairs = [(); 3].map(|()| loops.connect());
    for (n, &(channel, peer)) in (0..).zip(&pairs) {
        loops.receive(peer, n);
        loops.send(channel, n as u8 + 1, 10 + n);
    }
    let mut received: Vec<_> = (0..3).map(|_| next(&mut loops.peers)).collect();
    received.sort_by_key(|ended| ended.token);
    for (n, ended) in received.into_iter().enumerate() {
        assert_eq!(ended.channel, pairs[n].1);
        assert_eq!(ended.result().unwrap().byte_len() as usize, LEN);
        assert_eq!(ended.buffer[..], [n as u8 + 1; LEN]);
    }
    let mut sent: Vec<_> = (0..3).map(|_| next(&mut loops.here)).collect();
    sent.sort_by_key(|ended| ended.token);
    for (n, ended) in sent.iter().enumerate() {
        assert_eq!((ended.channel, ended.token), (pairs[n].0, 10 + n as u64));
        assert!(ended.result().is_ok());
    }
    drop(sent);
    assert!(loops.here.next_ended().unwrap().is_none());
    assert_eq!(loops.out(), 0);
    loops.finish();
}

/// A ring that goes round, with as many operations as fit.
#[test]
fn a_queue_has_the_room_that_the_channel_was_built_with() {
    let mut loops = Loops::on(FunctionDevice::make());
    let (channel, peer) = loops.connect();
    for round in 0..50 {
        for n in 0..4 {
            loops.receive(peer, n);
        }
        let one_more = ReceiveWorkRequest::new(loops.filled(0));
        let refused = loops.peers.post(peer, one_more, 9).unwrap_err();
        assert_eq!(refused.error, TransportError::QueueFull);
        assert_eq!(refused.buffer.unwrap().len(), LEN);
        let sends = 1 + round % 4;
        for n in 0..sends {
            loops.send(channel, n as u8, n);
        }
        assert_eq!(tokens(&mut loops.here, sends as usize), Vec::from_iter(0..sends));
        assert_eq!(tokens(&mut loops.peers, sends as usize), Vec::from_iter(0..sends));
        // The rest is used up.
        for n in sends..4 {
            loops.send(channel, n as u8, n);
        }
        assert_eq!(tokens(&mut loops.peers, 4 - sends as usize), Vec::from_iter(sends..4));
        assert_eq!(tokens(&mut loops.here, 4 - sends as usize), Vec::from_iter(sends..4));
    }
    assert_eq!((loops.in_flight(channel), loops.out()), (0, 0));
    loops.finish();
}

impl<D> Loops<D> {
    fn in_flight(&self, channel: ChannelId) -> usize {
        self.here.in_flight(channel)
    }
}

#[test]
fn a_loop_takes_only_channels_of_its_own_and_as_many_as_fit() {
    let mut loops = Loops::on(FunctionDevice::make());
    let (alone, peer) = crate::pair::connect(
        crate::pair::builder(&loops.domain),
        crate::pair::builder(&loops.domain),
    );
    let refused = loops.here.add(alone).unwrap_err();
    assert_eq!(refused.error.kind(), ErrorKind::InvalidInput);
    drop((refused, peer));
    let (mut one, two) =
        crate::pair::connect(loops.prepare(&loops.here), loops.prepare(&loops.here));
    // Only the loop may post and poll.
    assert_eq!(one.send(()).unwrap_err(), TransportError::OfLoop);
    // SAFETY: there is no memory.
    let refused = unsafe { one.post_unpolled(SendWorkRequest::new(())) };
    assert_eq!(refused.unwrap_err(), TransportError::OfLoop);
    assert!(loops.peers.add(one).is_err());
    drop(two);
    // 64 completions: eight channels with eight requests.
    for left in (0..8).rev() {
        loops.connect();
        assert_eq!(loops.here.capacity(), (64, 8 * left));
    }
    let (one, two) = crate::pair::connect(loops.prepare(&loops.here), loops.prepare(&loops.peers));
    let error = loops.here.add(one).unwrap_err().error;
    assert!(error.to_string().contains("max_send_wr"), "{error}");
    drop(two);
    let none = |builder: ChannelBuilder<'static>| builder.build().unwrap_err();
    let error = none(loops.prepare(&loops.here).sleep_after(1));
    assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
    loops.finish();
}

/// The first message of a peer comes before it has anything else to do.
#[test]
fn receives_can_be_posted_before_the_handshake() {
    let mut loops = Loops::on(FunctionDevice::make());
    let prepared = loops.prepare(&loops.peers).build().unwrap();
    let peer = loops.peers.add_prepared(prepared).unwrap();
    loops.receive(peer, 5);
    let early = SendWorkRequest::new(loops.filled(1));
    let refused = loops.peers.post(peer, early, 6).unwrap_err();
    assert_eq!(refused.error, TransportError::NotConnected);
    drop(refused);
    let other = loops.prepare(&loops.here).build().unwrap();
    let (remote, to_peer) = (other.endpoint(), loops.peers.endpoint(peer).unwrap());
    // A handshake that fails ends what was posted, and can be tried again.
    loops.device.fail("modify_qp").errno(libc::EIO).times(1);
    assert!(loops.peers.handshake(peer, remote).is_err());
    let ended = next(&mut loops.peers);
    assert_eq!((ended.token, ended.result().unwrap_err()), (5, TransportError::Stopped));
    drop(ended);
    let late = ReceiveWorkRequest::new(loops.filled(1));
    let refused = loops.peers.post(peer, late, 7).unwrap_err();
    assert_eq!(refused.error, TransportError::NotConnected);
    drop(refused);
    loops.peers.handshake(peer, remote).unwrap();
    assert!(loops.peers.handshake(peer, remote).is_err(), "it is connected");
    loops.receive(peer, 8);
    let channel = loops.here.add(other.handshake(to_peer).unwrap()).unwrap();
    loops.send(channel, 3, 1);
    assert_eq!(next(&mut loops.peers).token, 8);
    assert_eq!(next(&mut loops.here).token, 1);
    loops.finish();
}

#[test]
fn a_channel_that_is_removed_ends_its_operations_and_no_others() {
    let device = FunctionDevice::make();
    device.progress(Progress::Manual);
    let mut loops = Loops::on(device);
    let ((channel, peer), (other, _)) = (loops.connect(), loops.connect());
    loops.receive(peer, 0);
    loops.send(channel, 1, 1);
    loops.send(channel, 1, 2);
    loops.send(other, 1, 3);
    loops.here.remove(channel).unwrap();
    assert!(loops.here.remove(channel).is_err());
    assert!(loops.here.endpoint(channel).is_none());
    let late = SendWorkRequest::new(loops.filled(0));
    assert_eq!(loops.here.post(channel, late, 4).unwrap_err().error, TransportError::Closed);
    for token in [1, 2] {
        let ended = next(&mut loops.here);
        assert_eq!((ended.channel, ended.token), (channel, token));
        assert!(ended.result().unwrap_err().is_consequence());
    }
    assert!(loops.here.next_ended().unwrap().is_none());
    assert_eq!((loops.here.in_flight(other), loops.here.in_flight(channel)), (1, 0));
    // The place is used again, under another name.
    let (third, _) = loops.connect();
    assert_eq!(third.index(), channel.index());
    assert_ne!(third, channel);
    loops.send(third, 1, 5);
    let late = SendWorkRequest::new(loops.filled(0));
    assert!(loops.here.post(channel, late, 6).is_err());
    loops.finish();
}

/// A server whose clients come and go needs no more memory and no more of the completion queue.
#[test]
fn places_are_used_again() {
    let mut loops = Loops::on(FunctionDevice::make());
    for round in 0..100 {
        let (channel, peer) = loops.connect();
        assert_eq!((channel.index(), peer.index()), (0, 0), "{round}");
        loops.receive(peer, 0);
        loops.receive(peer, 1);
        loops.send(channel, 1, 2);
        assert_eq!(next(&mut loops.here).token, 2);
        loops.here.remove(channel).unwrap();
        loops.peers.remove(peer).unwrap();
        assert_eq!(next(&mut loops.peers).result().unwrap().byte_len() as usize, LEN);
        assert!(next(&mut loops.peers).result().is_err());
        assert_eq!((loops.here.capacity(), loops.out()), ((64, 64), 0));
    }
    loops.finish();
}

#[test]
fn a_post_that_the_device_refuses_gives_its_buffer_back() {
    let mut loops = Loops::on(FunctionDevice::make());
    let (channel, peer) = loops.connect();
    loops.device.fail("post_send").errno(libc::EINVAL).times(1);
    let refused = loops.here.post(channel, SendWorkRequest::new(loops.filled(1)), 1).unwrap_err();
    assert!(matches!(refused.error, TransportError::Verbs(_)) && refused.buffer.is_some());
    drop(refused);
    loops.device.fail("post_recv").errno(libc::ENOMEM).times(1);
    let refused = loops.peers.post(peer, ReceiveWorkRequest::new(loops.filled(1)), 1).unwrap_err();
    assert!(refused.buffer.is_some());
    drop(refused);
    assert!(loops.here.next_ended().unwrap().is_none());
    // The channel works.
    loops.receive(peer, 2);
    loops.send(channel, 1, 3);
    assert_eq!((next(&mut loops.here).token, next(&mut loops.peers).token), (3, 2));
    loops.finish();
}

/// The doorbell fails after the request was queued.
#[test]
fn a_post_that_may_be_queued_keeps_its_buffer_until_it_ends() {
    let mut loops = Loops::on(FunctionDevice::make());
    let (channel, _peer) = loops.connect();
    loops.device.fail("ring_doorbell").errno(libc::EACCES).times(1);
    let failed = loops.here.post(channel, SendWorkRequest::new(loops.filled(1)), 1).unwrap_err();
    assert!(failed.buffer.is_none());
    assert_eq!((loops.out(), loops.in_flight(channel)), (1, 1));
    // The queue pair went to ERR, which flushes it.
    let ended = next(&mut loops.here);
    assert_eq!(ended.token, 1);
    let error = ended.result().unwrap_err().work_error().unwrap();
    assert_eq!(error.class(), WorkErrorClass::Flushed);
    drop(ended);
    assert_eq!(loops.out(), 0);
    loops.here.remove(channel).unwrap();
    loops.finish();
}

#[test]
fn a_loop_of_any_buffer_takes_inline_bytes_too() {
    let device = Software::new();
    let loops = Loops::on(device);
    let mut any = Loop::<AnyBuffer>::new(loops.domain.context_parent(), 64).unwrap();
    let (one, two) = crate::pair::connect(loops.prepare(&any), loops.prepare(&any));
    let (one, two) = (any.add(one).unwrap(), any.add(two).unwrap());
    any.post(two, ReceiveWorkRequest::new(loops.filled(0)), 1).unwrap();
    any.post(two, ReceiveWorkRequest::new(()), 2).unwrap();
    any.post(one, SendWorkRequest::new(Inline(b"hello")), 3).unwrap();
    any.post(one, SendWorkRequest::new(()).immediate(9), 4).unwrap();
    let mut ended: Vec<_> = (0..4).map(|_| next(&mut any)).collect();
    ended.sort_by_key(|ended| ended.token);
    let [first, second, third, fourth] = ended.try_into().unwrap();
    assert_eq!(first.buffer.downcast::<PooledBuffer>().unwrap()[..], *b"hello");
    assert_eq!(second.result().unwrap().immediate(), Some(9));
    assert!(second.buffer.downcast::<PooledBuffer>().is_err());
    assert!(third.buffer.downcast::<()>().is_ok() && fourth.buffer.downcast::<()>().is_ok());
    drop(any);
    loops.finish();
}

#[test]
fn a_wait_sleeps_until_something_ends_or_the_deadline() {
    let mut loops = Loops::on(Software::on_sockets());
    let (channel, peer) = loops.connect();
    loops.receive(peer, 1);
    let soon = Instant::now() + Duration::from_millis(5);
    assert!(loops.peers.wait_ended_until(soon).unwrap().is_none());
    let message = SendWorkRequest::new(loops.filled(1));
    let Loops { mut here, mut peers, .. } = loops;
    let sending = thread::spawn(move || {
        here.post(channel, message, 2).unwrap();
        assert_eq!(here.wait_ended().unwrap().token, 2);
        here
    });
    assert_eq!(peers.wait_ended().unwrap().token, 1);
    let mut file = libc::pollfd {
        fd: std::os::fd::AsRawFd::as_raw_fd(&peers.as_fd()),
        events: libc::POLLIN,
        revents: 0,
    };
    let mut here = sending.join().unwrap();
    // The descriptor: armed, and nothing there. What the device had to do itself may have made it readable, but not again.
    let is_quiet = (0..10).any(|_| {
        peers.arm().unwrap();
        assert!(peers.next_ended().unwrap().is_none());
        // SAFETY: one valid entry.
        unsafe { libc::poll(&mut file, 1, 0) == 0 }
    });
    assert!(is_quiet);
    peers.post(peer, ReceiveWorkRequest::new(loops.pool.take().unwrap()), 3).unwrap();
    here.post(channel, SendWorkRequest::new(loops.pool.take().unwrap()), 4).unwrap();
    // SAFETY: as above.
    assert_eq!(unsafe { libc::poll(&mut file, 1, 10_000) }, 1);
    assert_eq!(next(&mut peers).token, 3);
    drop((here, peers));
    assert_eq!(loops.pool.available(), loops.pool.chunks());
}

/// The loop leaks what the program forgets, since the device may write there for ever.
#[test]
fn a_loop_may_be_forgotten_and_so_may_what_it_gives_back() {
    let device = FunctionDevice::make();
    device.stale_translation(true);
    let mut loops = Loops::on(device);
    let (channel, peer) = loops.connect();
    for n in 0..3 {
        loops.receive(peer, n);
    }
    loops.send(channel, 1, 0);
    std::mem::forget(next(&mut loops.peers));
    std::mem::forget(next(&mut loops.here));
    assert_eq!(loops.out(), 4);
    let Loops { mut here, peers, pool, domain, device } = loops;
    std::mem::forget(peers);
    // The queue pair of the loop is alive, and the device writes to the buffers of its receives.
    let sent = pool.take_from(&[5; LEN]).unwrap().unwrap();
    here.post(channel, SendWorkRequest::new(sent), 1).unwrap();
    assert_eq!(next(&mut here).token, 1);
    drop(here);
    device.run();
    assert_eq!(pool.chunks() - pool.available(), 4);
    assert_eq!(device.violations().0, 0, "{}", device.violations().1);
    drop((pool, domain));
}

#[test]
fn a_write_needs_no_receive() {
    let mut loops = Loops::on(FunctionDevice::make());
    let target = ibverbs::SharedMemoryRegion::<u64>::new(&loops.domain, 2, ALL).unwrap();
    let (channel, _peer) = loops.connect();
    let request = WriteWorkRequest::new(loops.filled(7), target.remote());
    loops.here.post(channel, request, 1).unwrap();
    assert!(next(&mut loops.here).result().is_ok());
    assert_eq!(target.as_slice().to_vec(), [u64::from_ne_bytes([7; 8]); 2]);
    // One byte too many is found before the device sees it.
    let request = WriteWorkRequest::new(loops.filled(7), target.remote_range(..1).unwrap());
    let refused = loops.here.post(channel, request, 1).unwrap_err();
    assert!(refused.buffer.is_some());
    assert_eq!(loops.device.violations().0, 0);
    drop((refused, target));
    loops.finish();
}

#[test]
fn a_channel_of_a_loop_that_is_gone_ends_quietly() {
    let loops = Loops::on(FunctionDevice::make());
    let Loops { here, peers, pool, domain, device } = loops;
    let prepared = here.create_channel(&domain).build().unwrap();
    drop((here, peers, pool));
    let channel: Channel<'_> = {
        let remote = prepared.endpoint();
        prepared.handshake(remote).unwrap()
    };
    drop((channel.reset().unwrap(), domain));
    device.assert_clean();
}

/// A place that a channel leaves is used by the next, whatever its depths are.
#[test]
fn places_are_bounded_by_the_channels_that_live() {
    let mut loops = Loops::on(Software::new());
    let (stays, _) = loops.connect();
    assert_eq!(stays.index(), 0);
    let mut rest = Vec::new();
    for sends in 0..12 {
        for receives in 0..12 {
            let builder = |of: &Loop<'static, PooledBuffer>| {
                let builder = of.create_channel(&loops.domain).access(ALL);
                builder.max_send_wr(sends).max_recv_wr(receives)
            };
            let (one, two) = crate::pair::connect(builder(&loops.here), builder(&loops.peers));
            let (one, two) = (loops.here.add(one).unwrap(), loops.peers.add(two).unwrap());
            assert_eq!((one.index(), two.index()), (1, 1));
            // A receive in flight keeps its place after the channel was removed, until the program takes it.
            if receives > 0 {
                loops.receive(two, 3);
                if sends > 0 {
                    loops.send(one, 7, 4);
                    assert_eq!(next(&mut loops.peers).buffer[..], [7; LEN]);
                    assert_eq!(next(&mut loops.here).token, 4);
                }
            }
            loops.here.remove(one).unwrap();
            loops.peers.remove(two).unwrap();
            while let Some(ended) = loops.peers.next_ended().unwrap() {
                rest.push(ended.channel);
            }
        }
    }
    assert_eq!(rest.len(), 11);
    loops.finish();
}

/// A device need not flush what is posted to a queue pair that has failed: Soft-RoCE does not look.
#[test]
fn a_receive_after_the_connection_has_failed_is_flushed() {
    let device = FunctionDevice::model();
    device.progress(Progress::Manual);
    let mut loops = Loops::on(device);
    let (channel, _peer) = loops.connect();
    let post = |loops: &mut Loops<FunctionDevice>, token| {
        let buffer = loops.filled(token as u8);
        loops.here.post(channel, ReceiveWorkRequest::new(buffer), token)
    };
    post(&mut loops, 1).unwrap();
    loops.send(channel, 9, 2);
    let number = loops.here.endpoint(channel).unwrap().num();
    loops.device.break_qp(number);
    let ended: Vec<_> = (0..2).map(|_| next(&mut loops.here)).collect();
    assert!(ended.iter().all(|ended| ended.result().is_err()));
    let posts = loops.device.calls("post_recv");
    for token in 3..7 {
        post(&mut loops, token).unwrap();
    }
    assert_eq!(post(&mut loops, 7).unwrap_err().error, TransportError::QueueFull);
    for token in 3..7 {
        let ended = next(&mut loops.here);
        assert_eq!((ended.channel, ended.token, ended.buffer[0]), (channel, token, token as u8));
        let error = ended.result().unwrap_err();
        assert_eq!(error.work_error().unwrap().status(), ibverbs::WorkStatus::Flushed);
    }
    assert!(loops.here.next_ended().unwrap().is_none());
    assert_eq!(loops.device.calls("post_recv"), posts);
    // A receive that the program has not taken before the channel is removed comes back as well.
    post(&mut loops, 8).unwrap();
    loops.here.remove(channel).unwrap();
    assert_eq!(next(&mut loops.here).token, 8);
    post(&mut loops, 9).unwrap_err();
    drop(ended);
    loops.finish();
}

#[test]
fn errors_name_what_was_called_and_what_to_change() {
    let mut loops = Loops::<_, PooledBuffer>::on(FunctionDevice::model());
    // A channel of another loop.
    let (foreign, _peer) =
        crate::pair::connect(loops.prepare(&loops.peers), loops.prepare(&loops.peers));
    let refused = loops.here.add(foreign).unwrap_err().to_string();
    assert!(refused.starts_with("Loop::add: ") && refused.contains("create_channel"), "{refused}");
    // An identifier of another loop.
    let (_here, there) = loops.connect();
    let (_one, _two) = loops.connect();
    for channel in [there, ChannelId::clone(&there)] {
        loops.here.remove(channel).ok();
    }
    let buffer = loops.filled(1);
    let refused = loops.here.post(there, SendWorkRequest::new(buffer), 0).unwrap_err();
    assert!(refused.to_string().contains("was never in it"), "{refused}");
    // The loop has too few entries for a channel.
    let mut small = Loop::<PooledBuffer>::new(loops.domain.context_parent(), 4).unwrap();
    let (one, _two) = crate::pair::connect(
        small.create_channel(&loops.domain),
        small.create_channel(&loops.domain),
    );
    let refused = small.add(one).unwrap_err().to_string();
    assert!(refused.contains("`entries`") && refused.contains("max_send_wr"), "{refused}");
}

#[test]
fn errors_that_give_something_back_convert_into_those_of_io() {
    let error = ibverbs::OperationError::<PooledBuffer>::from(TransportError::TimedOut);
    let io = std::io::Error::from(error);
    assert_eq!(io.kind(), std::io::ErrorKind::TimedOut);
    use ibverbs::channel::ScopeError;
    let exit = ScopeError::<TransportError>::Exit(TransportError::TimedOut);
    assert_eq!(std::io::Error::from(exit).kind(), std::io::ErrorKind::TimedOut);
    let closure = ScopeError::Closure(std::io::Error::from(std::io::ErrorKind::NotFound));
    assert_eq!(std::io::Error::from(closure).kind(), std::io::ErrorKind::NotFound);
    assert!(TransportError::QueueFull.is_retryable() && !TransportError::Closed.is_retryable());
    assert!(TransportError::NoCredit.is_retryable() && !TransportError::NoCredit.is_peer_gone());
}
