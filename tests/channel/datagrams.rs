//! Datagram ends of a loop: messages to any peer and to groups, in the same table as channels.

use std::io::Write as _;
use std::sync::Arc;

use ibverbs::channel::{AnyBuffer, DatagramsBuilder};
use ibverbs::device::Gid;
use ibverbs::pool::DatagramBuffer;
use ibverbs::{
    AccessFlags, BufferPool, ChannelId, Inline, Loop, OperationError, PooledBuffer,
    ProtectionDomain, ReceiveWorkRequest, SendWorkRequest, TransportError, WriteWorkRequest,
    operation::DatagramDestination, queue_pair::AddressVector,
};
use ibverbs_function_device::Builder;
use ibverbs_software::{LiveObjects, Verb};

use crate::loops::next;
use crate::pair::domain;
use crate::software::Software;

const LEN: usize = 64;
const QKEY: u32 = 0x77;

struct Ends {
    here: Loop<'static, PooledBuffer>,
    pool: BufferPool,
    domain: Arc<ProtectionDomain<'static>>,
    device: Software,
}

impl Ends {
    fn new() -> Self {
        let device = Software::new();
        let domain = domain(&device);
        let pool = BufferPool::new(&domain, 40 + LEN, 64, AccessFlags::empty()).unwrap();
        let here = Loop::new(domain.context_parent(), 256).unwrap();
        Self { here, pool, domain, device }
    }

    fn builder(&self) -> DatagramsBuilder<'static> {
        DatagramsBuilder::new(&self.domain).qkey(QKEY).max_send_wr(4).max_recv_wr(4)
    }

    fn end(&mut self) -> ChannelId {
        let builder = self.builder();
        self.here.add_datagrams(builder).unwrap()
    }

    /// The destination of `to` for sends from `from`.
    fn way(&self, from: ChannelId, to: ChannelId) -> DatagramDestination {
        self.here.destination(from, &self.here.endpoint(to).unwrap()).unwrap()
    }

    fn receive(&mut self, end: ChannelId, token: u64) {
        let buffer = self.pool.take().unwrap();
        self.here.post(end, ReceiveWorkRequest::new(buffer), token).unwrap();
    }

    fn message(&self, text: &[u8]) -> DatagramBuffer {
        let mut message = DatagramBuffer::new(self.pool.take().unwrap()).unwrap();
        message.write_all(text).unwrap();
        message
    }

    fn send(&mut self, end: ChannelId, text: &[u8], to: &DatagramDestination) {
        let message = self.message(text);
        self.here.send_to(end, message, to, 99).unwrap();
    }

    /// Returns the token and buffer of the next operation that ends and, if it is a receive, the sender.
    #[track_caller]
    fn next(&mut self) -> (u64, DatagramBuffer, Option<DatagramDestination>) {
        let ended = next(&mut self.here);
        let success = ended.result().unwrap();
        let message = DatagramBuffer::from(ended.buffer);
        let is_received = ended.token != 99;
        let sender =
            is_received.then(|| self.here.sender(ended.channel, &success, &message.header()));
        (ended.token, message, sender.transpose().unwrap())
    }

    /// Asserts that nothing more comes.
    #[track_caller]
    fn is_quiet(&mut self) {
        self.device.run();
        assert!(self.here.next_ended().unwrap().is_none());
    }

    #[track_caller]
    fn finish(self) {
        let Self { here, pool, domain, device } = self;
        drop(here);
        assert_eq!(pool.available(), pool.chunks());
        drop((pool, domain));
        device.assert_clean();
    }
}

/// On InfiniBand a group has an address that the subnet manager gives (`MulticastMembership::peer`): its GID and its LID.
#[test]
fn a_group_of_infiniband_is_joined_by_what_its_membership_says() {
    let network = ibverbs_function_device::LinkLayer::InfiniBand;
    let device = Builder::model().link_layer(network).build();
    let domain = Arc::new(ProtectionDomain::new(Arc::new(device.context())).unwrap());
    let pool = BufferPool::new(&domain, 40 + LEN, 8, AccessFlags::empty()).unwrap();
    let mut here = Loop::<PooledBuffer>::new(domain.context_parent(), 128).unwrap();
    let mut end = || here.add_datagrams(DatagramsBuilder::new(&domain).qkey(QKEY)).unwrap();
    let [one, two, three] = [(); 3].map(|()| end());
    let refused = here.group(one, "239.1.2.3".parse().unwrap()).unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(libc::EOPNOTSUPP));
    assert!(refused.to_string().contains("rdmacm::MulticastMembership"), "{refused}");
    const LID: u16 = 0xc003;
    let gid: Gid = "ff12:401b:ffff::3".parse().unwrap();
    let path = AddressVector::new(1, LID).global(gid, 0);
    let group = DatagramDestination { path, number: DatagramDestination::MEMBERS, qkey: QKEY };
    here.join(two, &group).unwrap();
    let joined = device.last_call("attach_mcast").unwrap();
    assert_eq!((joined.lid, Gid::from(joined.gid)), (LID, gid));
    here.join(three, &group).unwrap();
    let receive = |here: &mut Loop<'static, PooledBuffer>, end| {
        here.post(end, ReceiveWorkRequest::new(pool.take().unwrap()), 1).unwrap();
    };
    for end in [one, two, three] {
        receive(&mut here, end);
    }
    here.send_to(one, pool.take_from(b"all").unwrap().unwrap(), &group, 99).unwrap();
    let mut heard = Vec::new();
    while let Some(ended) = here.next_ended().unwrap() {
        let success = ended.result().unwrap();
        if ended.token == 99 {
            continue;
        }
        let message = DatagramBuffer::from(ended.buffer);
        assert_eq!(message[..], *b"all");
        // The way back is to the sender's port, and not to the group.
        let sender = here.sender(ended.channel, &success, &message.header()).unwrap();
        let endpoint = here.endpoint(one).unwrap();
        assert_eq!((sender.number, sender.path.lid()), (endpoint.num(), endpoint.lid()));
        assert_ne!(sender.path.gid(), Some(gid));
        let context = domain.context();
        let back = AddressVector::reply_to(context, 1, &success, &message.header()).unwrap();
        assert_eq!(back, sender.path);
        heard.push(ended.channel);
    }
    assert_eq!(heard, [two, three]);
    here.leave(two, &group).unwrap();
    here.leave(two, &group).unwrap_err();
    let left = device.last_call("detach_mcast").unwrap();
    assert_eq!((left.lid, Gid::from(left.gid)), (LID, gid));
    drop((here, pool, domain));
    device.assert_clean();
}

#[track_caller]
fn text<B>(refused: Result<(), OperationError<B>>) -> String {
    let refused = refused.expect_err("it is refused");
    assert!(refused.buffer.is_some(), "the buffer comes back");
    refused.error.to_string()
}

#[test]
fn a_message_goes_to_its_peer_and_the_answer_back() {
    let mut ends = Ends::new();
    let [one, two, three] = [(); 3].map(|()| ends.end());
    let to_two = ends.way(one, two);
    for round in 0..9_u8 {
        ends.receive(one, 1);
        ends.receive(two, 2);
        ends.receive(three, 3);
        ends.send(one, &[round; LEN], &to_two);
        assert_eq!(ends.next().0, 99);
        let (token, message, sender) = ends.next();
        assert_eq!((token, &message[..]), (2, &[round; LEN][..]));
        let gids = [message.header().source(), message.header().destination()];
        assert_eq!(gids, [to_two.path.gid(); 2], "all on one device");
        let sender = sender.unwrap();
        assert_eq!(sender.path.gid(), to_two.path.gid());
        assert_eq!((sender.number, sender.qkey), (ends.here.endpoint(one).unwrap().num(), QKEY));
        // The receiver sends the message back as it is, without its header.
        ends.here.send_to(two, message, &sender, 99).unwrap();
        assert_eq!(ends.next().0, 99);
        let (token, message, _) = ends.next();
        assert_eq!((token, &message[..]), (1, &[round; LEN][..]));
        // With a number, without bytes, and bytes that are copied.
        let request = SendWorkRequest::new(ends.message(b"")).immediate(5);
        ends.here.send_to(one, request, &ends.way(one, three), 99).unwrap();
        assert_eq!(ends.next().0, 99);
        let ended = next(&mut ends.here);
        assert_eq!((ended.token, ended.result().unwrap().immediate()), (3, Some(5)));
        assert_eq!(ended.buffer.len(), 40);
    }
    ends.finish();
}

/// Channels and datagram ends on one loop, whose buffers are of several types.
#[test]
fn channels_and_datagrams_share_a_loop() {
    let ends = Ends::new();
    let mut both = Loop::<AnyBuffer>::new(ends.domain.context_parent(), 256).unwrap();
    let prepare = || both.create_channel(&ends.domain).max_inline_data(8);
    let (one, two) = crate::pair::connect(prepare(), prepare());
    let (one, two) = (both.add(one).unwrap(), both.add(two).unwrap());
    let end = both.add_datagrams(ends.builder()).unwrap();
    let itself = both.destination(end, &both.endpoint(end).unwrap()).unwrap();
    let take = || ends.pool.take().unwrap();
    both.post(end, ReceiveWorkRequest::new(take()), 1).unwrap();
    both.post(two, ReceiveWorkRequest::new(take()), 2).unwrap();
    both.send_to(end, Inline(b"datagram"), &itself, 3).unwrap();
    both.post(one, SendWorkRequest::new(Inline(b"message")), 4).unwrap();
    let mut ended = [(); 4].map(|()| next(&mut both));
    ended.sort_by_key(|ended| ended.token);
    let [datagram, message, ..] = ended;
    assert_eq!((datagram.channel, message.channel), (end, two));
    let message = message.buffer.downcast::<PooledBuffer>().unwrap();
    let datagram = DatagramBuffer::from(datagram.buffer.downcast::<PooledBuffer>().unwrap());
    assert_eq!((&message[..], &datagram[..]), (&b"message"[..], &b"datagram"[..]));
    drop((message, datagram, both));
    ends.finish();
}

#[test]
fn members_of_a_group_hear_what_is_sent_to_it() {
    let mut ends = Ends::new();
    let [sender, near, far] = [(); 3].map(|()| ends.end());
    let group = ends.here.group(sender, "239.1.2.3".parse().unwrap()).unwrap();
    assert_eq!(group.number, DatagramDestination::MEMBERS);
    for (end, token) in [(near, 1), (far, 2)] {
        ends.here.join(end, &group).unwrap();
        ends.receive(end, token);
    }
    ends.receive(sender, 3);
    ends.send(sender, b"all", &group);
    let mut heard = vec![];
    for _ in 0..3 {
        let (token, message, from) = ends.next();
        heard.push(token);
        if let Some(from) = from {
            assert_eq!(message[..], *b"all");
            assert_eq!(message.header().destination(), group.path.gid());
            // The answer goes to the sender alone, though the message came to a group.
            ends.here.send_to(near, message, &from, 99).unwrap();
        }
    }
    heard.sort_unstable();
    assert_eq!(heard, [1, 2, 99]);
    let answers: Vec<_> = (0..3).map(|_| ends.next().0).collect();
    assert_eq!(answers.iter().filter(|&&token| token == 3).count(), 1, "{answers:?}");
    // An end that has left the group does not hear it any more.
    ends.here.leave(far, &group).unwrap();
    ends.receive(far, 4);
    ends.receive(near, 5);
    ends.send(sender, b"some", &group);
    let mut heard = [ends.next().0, ends.next().0];
    heard.sort_unstable();
    assert_eq!(heard, [5, 99]);
    ends.is_quiet();
    let error = ends.here.leave(far, &group).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EINVAL));
    ends.here.remove(near).unwrap();
    let no_group = ends.here.group(sender, "10.0.0.1".parse().unwrap()).unwrap_err().to_string();
    assert!(no_group.contains("not that of a multicast group"), "{no_group}");
    let itself = ends.way(sender, far);
    let error = ends.here.join(far, &itself).unwrap_err().to_string();
    assert!(error.contains("not a multicast GID"), "{error}");
    ends.finish();
}

/// An end keeps as many address handles as it may, and one for each send in flight. They go with the end.
#[test]
fn address_handles_are_kept_by_their_paths_and_no_more_than_said() {
    let mut ends = Ends::new();
    let builder = ends.builder().address_handles(3);
    let (end, peer) = (ends.here.add_datagrams(builder).unwrap(), ends.end());
    let handles = |ends: &Ends| ends.device.live_objects().address_handles;
    let to = ends.way(end, peer);
    let towards = |class: u8| DatagramDestination { path: to.path.traffic_class(class), ..to };
    let send = |ends: &mut Ends, class: u8| {
        ends.send(end, b"", &towards(class));
        assert_eq!(ends.next().0, 99);
    };
    for class in [0, 1, 2, 0, 1, 2, 0] {
        send(&mut ends, class);
    }
    assert_eq!(handles(&ends), 3, "each was made once");
    ends.device.fail_always(Verb::CreateAh, libc::ENOMEM);
    for class in [0, 2, 1] {
        send(&mut ends, class);
    }
    let message = ends.message(b"kept");
    let refused = ends.here.send_to(end, message, &towards(9), 1).unwrap_err();
    assert_eq!(refused.error.raw_os_error(), Some(libc::ENOMEM));
    assert_eq!(DatagramBuffer::from(refused.buffer.unwrap())[..], *b"kept");
    ends.device.clear_failures();
    for class in 3..=255 {
        send(&mut ends, class);
        assert!(handles(&ends) <= 3 + 4, "{}", handles(&ends));
    }
    // 255 was used just now, and 0 long ago.
    ends.device.fail_always(Verb::CreateAh, libc::ENOMEM);
    send(&mut ends, 255);
    let message = ends.message(b"");
    assert!(ends.here.send_to(end, message, &towards(0), 1).is_err());
    ends.device.clear_failures();
    ends.here.remove(end).unwrap();
    assert_eq!(handles(&ends), 0);
    ends.finish();
}

#[test]
fn what_is_written_is_the_message_and_nothing_of_an_earlier_user_is_left() {
    let ends = Ends::new();
    let pool = BufferPool::new(&ends.domain, 40 + LEN, 1, AccessFlags::empty()).unwrap();
    drop(pool.take_from(&[0xee; 40 + LEN]).unwrap().unwrap());
    // A buffer that was never received into has no header yet: the message begins behind it all the same.
    let mut message = DatagramBuffer::from(pool.take().unwrap());
    assert!(message.is_empty());
    message.extend_from_slice(b"a").unwrap();
    message.write_all(b"b").unwrap();
    assert_eq!(message[..], *b"ab");
    message.clear();
    assert!(message.is_empty());
    message.write_all(&[1; LEN]).unwrap();
    assert!(message.extend_from_slice(b"x").is_err() && message.len() == LEN);
    assert_eq!(message.into_inner()[..40], [0; 40]);
    let whole = DatagramBuffer::new(pool.take().unwrap()).unwrap().into_inner();
    assert_eq!(whole[..], [0; 40]);
    drop((whole, pool));
    let short = BufferPool::new(&ends.domain, 8, 1, AccessFlags::empty()).unwrap();
    let mut message = DatagramBuffer::from(short.take().unwrap());
    assert!(message.write(b"x").unwrap() == 0 && message.extend_from_slice(b"x").is_err());
    drop((message, short));
    ends.finish();
}

#[test]
fn what_is_wrong_is_refused_before_the_device_sees_it() {
    let mut ends = Ends::new();
    let [one, two] = [(); 2].map(|()| ends.end());
    let to = ends.way(one, two);
    let long = BufferPool::new(&ends.domain, 8192, 1, AccessFlags::empty()).unwrap();
    let whole = || long.take_from(&[7; 8192]).unwrap().unwrap();
    let refused = text(ends.here.send_to(one, whole(), &to, 0));
    assert!(refused.contains("by the port's MTU") && refused.contains("is 8192"), "{refused}");
    let refused =
        text(ends.here.send_to(one, whole(), &DatagramDestination { number: 1 << 24, ..to }, 0));
    assert!(refused.contains("number of the remote queue pair"), "{refused}");
    let port = ibverbs::queue_pair::AddressVector::new(2, 0).global(to.path.gid().unwrap(), 0);
    let refused =
        text(ends.here.send_to(one, whole(), &DatagramDestination { path: port, ..to }, 0));
    assert!(refused.contains("another port"), "{refused}");
    // These sends have no destination.
    let refused = text(ends.here.post(one, SendWorkRequest::new(whole()), 0));
    assert!(refused.contains("by the port's MTU"), "{refused}");
    let small = ends.pool.take_from(b"hello").unwrap().unwrap();
    let refused = text(ends.here.post(one, SendWorkRequest::new(small), 0));
    assert!(refused.contains("send_to"), "{refused}");
    let target =
        ibverbs::SharedMemoryRegion::<u64>::new(&ends.domain, 8, crate::pair::ALL).unwrap();
    let small = ends.pool.take_from(b"hello").unwrap().unwrap();
    let refused = text(ends.here.post(one, WriteWorkRequest::new(small, target.remote()), 0));
    assert!(refused.contains("no writes and reads"), "{refused}");
    // A receive without room for what precedes a datagram.
    let short = BufferPool::new(&ends.domain, 39, 1, AccessFlags::empty()).unwrap();
    let refused = text(ends.here.post(one, ReceiveWorkRequest::new(short.take().unwrap()), 0));
    assert!(refused.contains("40 bytes precede each datagram"), "{refused}");
    let error = DatagramBuffer::new(short.take().unwrap()).unwrap_err().to_string();
    assert!(error.contains("40 bytes more"), "{error}");
    let exact = BufferPool::new(&ends.domain, 40, 1, AccessFlags::empty()).unwrap();
    ends.here.post(two, ReceiveWorkRequest::new(exact.take().unwrap()), 1).unwrap();
    ends.send(one, b"", &to);
    assert_eq!([ends.next().0, ends.next().0], [99, 1]);
    // The refused operations have taken no place of the queue.
    for _ in 0..4 {
        ends.send(one, b"", &to);
    }
    let message = ends.message(b"");
    let full = ends.here.send_to(one, message, &to, 0).unwrap_err();
    assert_eq!(full.error, TransportError::QueueFull);
    drop(full);
    (0..4).for_each(|_| assert_eq!(ends.next().0, 99));
    // Names of other kinds, and of none.
    let error = ends.here.take_out(one).err().unwrap().to_string();
    assert!(error.contains("a datagram end is not taken out"), "{error}");
    let (channel, _other) = crate::pair::connect(
        ends.here.create_channel(&ends.domain),
        ends.here.create_channel(&ends.domain),
    );
    let channel = ends.here.add(channel).unwrap();
    let error = ends.here.join(channel, &to).unwrap_err().to_string();
    assert!(error.contains("no such datagram end"), "{error}");
    ends.here.remove(two).unwrap();
    for end in [channel, two] {
        let message = ends.message(b"");
        let gone = ends.here.send_to(end, message, &to, 0).unwrap_err();
        assert_eq!(gone.error, TransportError::Closed);
        assert!(gone.buffer.is_some());
    }
    drop((long, short, exact, target, _other));
    ends.finish();
}

/// The device drops what nobody waits for, and what does not have the right key; the end goes on.
#[test]
fn what_is_lost_is_lost_without_a_word() {
    let mut ends = Ends::new();
    let [one, two] = [(); 2].map(|()| ends.end());
    let to = ends.way(one, two);
    ends.send(one, b"no receive", &to);
    assert_eq!(ends.next().0, 99);
    ends.is_quiet();
    ends.receive(two, 1);
    ends.send(one, b"another key", &DatagramDestination { qkey: QKEY + 1, ..to });
    assert_eq!(ends.next().0, 99);
    ends.send(one, b"nobody", &DatagramDestination { number: 0x123_456, ..to });
    assert_eq!(ends.next().0, 99);
    ends.is_quiet();
    ends.send(one, b"heard", &to);
    assert_eq!(ends.next().0, 99);
    let (token, message, _) = ends.next();
    assert_eq!((token, &message[..]), (1, &b"heard"[..]));
    drop(message);
    ends.finish();
}

/// With sends and receives in flight, the end is removed, and the loop dropped; the handles go after the queue pair.
#[test]
fn what_is_in_flight_ends_with_its_end() {
    for is_removed in [true, false] {
        let mut ends = Ends { device: Software::manual(), ..Ends::new() };
        ends.domain = domain(&ends.device);
        ends.pool = BufferPool::new(&ends.domain, 40 + LEN, 64, AccessFlags::empty()).unwrap();
        ends.here = Loop::new(ends.domain.context_parent(), 64).unwrap();
        let builder = ends.builder().address_handles(1);
        let (one, two) = (ends.here.add_datagrams(builder).unwrap(), ends.end());
        let to = ends.way(one, two);
        ends.receive(two, 1);
        for class in 0..3 {
            let to = DatagramDestination { path: to.path.traffic_class(class), ..to };
            ends.send(one, b"late", &to);
        }
        assert_eq!(ends.here.in_flight(one), 3);
        let handles = ends.device.live_objects().address_handles;
        assert_eq!(handles, 3, "one is kept by its path, and those of sends in flight");
        if is_removed {
            ends.here.remove(two).unwrap();
            ends.here.remove(one).unwrap();
            // The device may have sent them.
            let mut tokens = [(); 4].map(|()| {
                let ended = next(&mut ends.here);
                assert!(ended.token == 99 || ended.result().is_err());
                ended.token
            });
            tokens.sort_unstable();
            assert_eq!(tokens, [1, 99, 99, 99]);
            let live = ends.device.live_objects();
            assert_eq!((live.queue_pairs, live.address_handles), (0, 0));
        }
        ends.finish();
    }
}

/// A queue pair that cannot be destroyed may use its handles for ever: they are leaked with it.
#[test]
fn handles_are_leaked_with_their_queue_pair() {
    let mut ends = Ends::new();
    let [one, two] = [(); 2].map(|()| ends.end());
    let to = ends.way(one, two);
    ends.send(one, b"", &to);
    assert_eq!(ends.next().0, 99);
    ends.device.fail_next(Verb::DestroyQp, libc::EBUSY);
    ends.here.remove(one).unwrap_err();
    ends.here.remove(two).unwrap();
    let live = ends.device.live_objects();
    assert_eq!((live.queue_pairs, live.address_handles), (1, 1));
    let Ends { here, pool, domain, device } = ends;
    drop((here, pool, domain));
    assert_ne!(device.live_objects(), LiveObjects::default());
}
