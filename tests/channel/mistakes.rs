//! Mistakes of beginners: each error names what they called, and what to change.

use std::sync::Arc;

use ibverbs::channel::{AnyBuffer, DatagramsBuilder};
use ibverbs::future::Local;
use ibverbs::operation::{PreparedReceive, ReceiveList, SendList};
use ibverbs::queue_pair::{SendOperations, SharedReceiveQueue};
use ibverbs::{
    AccessFlags, BufferPool, Channel, Inline, Loop, MemoryRegion, PooledBuffer, ProtectionDomain,
    Rc, Reactor, ReadWorkRequest, ReceiveWorkRequest, SendWorkRequest, TransportError,
    TransportResult, WriteWorkRequest, completion::WorkErrorClass, operation::PreparedRequest,
};

use crate::loops::{LEN, Loops};
use crate::pair::{Pair, builder, connect, domain};
use crate::software::Software;

/// Asserts that the error's text has all of these words.
#[track_caller]
fn says<T>(result: Result<T, impl std::fmt::Display>, words: &[&str]) {
    let said = result.err().expect("it is refused").to_string();
    words.iter().for_each(|word| assert!(said.contains(word), "{word:?} is not in: {said}"));
}

/// Memory of another domain, and of another device, on every layer: nothing reaches the device, and the channel goes on.
#[test]
#[cfg_attr(not(debug_assertions), ignore = "only debug builds know where memory is registered")]
fn memory_of_another_domain_is_refused_before_the_post() {
    const WORDS: &[&str] = &["registered in another protection domain", "register it in"];
    let mut pair = Pair::new();
    let other = Arc::new(ProtectionDomain::new(pair.domain.context_parent()).unwrap());
    let device = Software::new();
    let elsewhere = domain(&device);
    for foreign in [&other, &elsewhere] {
        let mut region = MemoryRegion::<u8>::new(foreign, 64).unwrap();
        let target = pair.shared(8);
        let mut own = pair.region(8, 0);
        let Pair { one, two, .. } = &mut pair;
        says(one.send(region.slice(..).unwrap()), WORDS);
        says(one.receive(region.slice_mut(..).unwrap()), WORDS);
        says(one.write(region.slice(..).unwrap(), target.remote()), WORDS);
        says(one.read(region.slice_mut(..).unwrap(), target.remote()), WORDS);
        let scoped = one.scope(|s| -> TransportResult<()> {
            let (sent, received) = region.slice_mut(..)?.split_at(8)?;
            says(s.post_send(sent).map(drop), WORDS);
            says(s.post_receive(received).map(drop), WORDS);
            Ok(())
        });
        scoped.unwrap();
        // The channel works.
        two.scope(|s| -> TransportResult<()> {
            let receive = s.post_receive(own.slice_mut(..)?)?;
            one.send(Inline(b"own"))?;
            receive.wait().map(drop)
        })
        .unwrap();
        drop((own, target, region));
        let pool = BufferPool::new(foreign, LEN, 4, AccessFlags::empty()).unwrap();
        let mut here = Loop::<PooledBuffer>::new(pair.domain.context_parent(), 64).unwrap();
        let prepare = || here.create_channel(&pair.domain).max_send_wr(4).max_recv_wr(4);
        let (channel, _peer) = connect(prepare(), prepare());
        let channel = here.add(channel).unwrap();
        let take = || pool.take_from(b"foreign").unwrap().unwrap();
        says(here.post(channel, SendWorkRequest::new(take()), 0), WORDS);
        says(here.post(channel, ReceiveWorkRequest::new(take()), 0), WORDS);
        let end = DatagramsBuilder::new(&pair.domain).max_send_wr(4).max_recv_wr(4);
        let end = here.add_datagrams(end).unwrap();
        let to = here.destination(end, &here.endpoint(end).unwrap()).unwrap();
        says(here.send_to(end, take(), &to, 0), WORDS);
        assert_eq!(pool.available(), 4);
        let reactor = Reactor::new(pair.domain.context_parent(), 64).unwrap();
        let channel = reactor.prepare(builder(&pair.domain)).unwrap();
        let itself = channel.endpoint();
        let channel = channel.handshake(itself).unwrap();
        let refused = channel.submit(SendWorkRequest::new(take()));
        says(refused.map(drop), WORDS);
        says(channel.post_receive(take()), WORDS);
        drop((channel, reactor, here, pool, _peer));
        // A queue pair by hand.
        let region = MemoryRegion::<u8>::new(foreign, 64).unwrap();
        let queue = pair.domain.context().create_cq(4).unwrap();
        let queue_pair = pair.domain.create_qp(&queue, &queue, ibverbs::Rc).build().unwrap();
        let itself = queue_pair.endpoint();
        let mut queue_pair = queue_pair.handshake(itself).unwrap();
        // SAFETY: the region is not touched before both are dropped, the queue pair first.
        says(unsafe { queue_pair.post(SendWorkRequest::new(&region), 1) }, WORDS);
        drop(queue_pair);
    }
    // A parent domain is the domain that it was made from.
    // SAFETY: it has no thread domain.
    if let Ok(parent) = unsafe { ProtectionDomain::parent_domain(&pair.domain, None) } {
        let mut region = MemoryRegion::<u8>::new(Arc::new(parent), 8).unwrap();
        let Pair { one, two, .. } = &mut pair;
        two.scope(|s| -> TransportResult<()> {
            let receive = s.post_receive(region.slice_mut(..)?)?;
            one.send(Inline(b"parent"))?;
            receive.wait().map(drop)
        })
        .unwrap();
    }
    drop((other, elsewhere));
    device.assert_clean();
    pair.finish();
}

#[test]
#[cfg_attr(not(debug_assertions), ignore = "only debug builds know where memory is registered")]
fn lists_and_shared_receives_refuse_memory_of_another_domain() {
    const WORDS: &[&str] = &["registered in another protection domain", "register it in"];
    let pair = Pair::new();
    let other = Arc::new(ProtectionDomain::new(pair.domain.context_parent()).unwrap());
    let device = Software::new();
    let elsewhere = domain(&device);
    for foreign in [&other, &elsewhere] {
        let pool = BufferPool::new(foreign, LEN, 4, AccessFlags::empty()).unwrap();
        let take = || pool.take_from(b"foreign").unwrap().unwrap();
        let region = MemoryRegion::<u8>::new(foreign, 64).unwrap();
        let domain = &pair.domain;
        let mut here = Loop::<AnyBuffer>::new(domain.context_parent(), 64).unwrap();
        let prepare = || here.create_channel(domain).max_send_wr(4).max_recv_wr(4);
        let (channel, _peer) = connect(prepare(), prepare());
        let channel = here.add(channel).unwrap();
        says(here.post(channel, SendWorkRequest::new(take()), 0), WORDS);
        let receives = here.add_shared_receives(domain, 4).unwrap();
        says(here.post(receives, ReceiveWorkRequest::new(take()), 0), WORDS);
        let reactor = Reactor::<Local<AnyBuffer>>::with_share(domain.context_parent(), 64).unwrap();
        let channel = reactor.prepare(builder(domain)).unwrap();
        let itself = channel.endpoint();
        let channel = channel.handshake(itself).unwrap();
        says(channel.submit(SendWorkRequest::new(take())).map(drop), WORDS);
        let receives = reactor.add_shared_receives(domain, 4).unwrap();
        says(receives.post(take()), WORDS);
        assert_eq!(pool.available(), 4);
        drop((receives, channel, reactor, _peer, here, pool));
        // Queue pairs of the verbs layer, with and without the extended interface, refuse it too.
        let queue = domain.context().create_cq(16).unwrap();
        for extended in [None, Some(SendOperations::SEND)] {
            let to_build = domain.create_qp(&queue, &queue, Rc).max_send_wr(4).max_recv_wr(4);
            let built = match extended {
                Some(operations) => to_build.extended(operations).build(),
                None => to_build.build(),
            };
            let Ok(prepared) = built else { continue };
            let itself = prepared.endpoint();
            let mut queue_pair = prepared.handshake(itself).unwrap();
            let own = domain.allocate::<u8>(8).unwrap();
            let mut into = MemoryRegion::<u8>::new(foreign, 64).unwrap();
            let elements = [own.gather_element(..).unwrap(), region.gather_element(..8).unwrap()];
            let send = SendWorkRequest::new(&elements[1]);
            let mut one = PreparedRequest::new(send, 0).unwrap();
            let mut entries = elements
                .each_ref()
                .map(|element| PreparedRequest::new(SendWorkRequest::new(element), 0).unwrap());
            let mut list = SendList::new(&mut entries).unwrap();
            let mut into_foreign = [into.scatter_element(..8).unwrap()];
            let receive = ReceiveWorkRequest::new(&mut into_foreign);
            let mut receive = [PreparedReceive::new(receive).unwrap()];
            // SAFETY: nothing that is posted outlives the queue pair, which is dropped first.
            unsafe {
                says(queue_pair.post_prepared(&mut one, 1), WORDS);
                says(queue_pair.post_prepared(&mut receive[0], 1), WORDS);
                let mut receive = ReceiveList::new(&mut receive).unwrap();
                says(queue_pair.post_list(&mut list), WORDS);
                says(queue_pair.post_receive_list(&mut receive), WORDS);
                let batch = queue_pair.batch(|batch| batch.add(send, 1));
                says(batch, WORDS);
                let (mut sends, mut receives) = queue_pair.split();
                says(sends.post_list(&mut list), WORDS);
                says(receives.post_receive_list(&mut receive), WORDS);
            }
            drop(queue_pair);
        }
        let shared = SharedReceiveQueue::new(domain, 4, 1).unwrap();
        let mut into = MemoryRegion::<u8>::new(foreign, 64).unwrap();
        // SAFETY: nothing is posted.
        says(unsafe { shared.post_receive(&mut into, .., 1) }, WORDS);
    }
    drop((other, elsewhere));
    device.assert_clean();
    pair.finish();
}

/// One side gets the right error, and the other one a text that says where to look.
#[test]
fn both_sides_send_before_they_have_posted_receives() {
    let set = |builder: ibverbs::ChannelBuilder<'static>| {
        let never = ibverbs::settings::MaxRnrRetries::new(0).unwrap();
        builder
            .max_rnr_retries(never)
            .max_ack_retries(ibverbs::settings::MaxAckRetries::new(1).unwrap())
    };
    let mut pair = Pair::with(Software::new(), set);
    let first = pair.one.send(Inline(b"first")).unwrap_err();
    assert!(first.to_string().contains("posts receives too late, or none at all"), "{first}");
    assert!(!first.is_peer_gone());
    let second = pair.two.send(Inline(b"second")).unwrap_err();
    for words in ["the peer is gone", "its own error says why", "post receives before they send"] {
        assert!(second.to_string().contains(words), "{second}");
    }
    assert!(second.is_peer_gone() && !second.is_retryable());
    assert_eq!(second.work_error().unwrap().class(), WorkErrorClass::Transport);
    pair.finish();
}

#[test]
fn an_id_of_another_loop_names_no_channel() {
    let mut loops = Loops::on(Software::new());
    let (here, there) = loops.connect();
    assert_eq!(here.index(), there.index());
    let buffer = loops.filled(1);
    let refused = loops.here.post(there, SendWorkRequest::new(buffer), 0);
    says(refused, &["removed from this loop, or was never in it"]);
    says(loops.here.remove(there), &["the loop has no such channel"]);
    assert!(loops.here.endpoint(there).is_none() && loops.here.endpoint(here).is_some());
    loops.finish();
}

#[test]
fn a_channel_that_was_taken_out_is_named_so() {
    const OUT: &[&str] = &["was taken out of the loop", "put it back"];
    let mut loops = Loops::on(Software::new());
    let (here, there) = loops.connect();
    let detached = loops.here.take_out(here).unwrap();
    says(loops.here.remove(here), OUT);
    says(loops.here.take_out(here).map(drop), OUT);
    says(loops.here.handshake(here, detached.endpoint()), OUT);
    let receive = ReceiveWorkRequest::new(loops.filled(0));
    let refused = loops.here.post(here, receive, 0).unwrap_err();
    says(Err::<(), _>(refused.error), &["taken out of its loop", "until it is put back"]);
    drop(refused);
    // Another loop refuses the channel.
    let refused = loops.peers.put_back(detached).unwrap_err();
    says(Err::<(), _>(refused.error), &["taken out of another loop"]);
    let destroyed = refused.object.destroy();
    says(loops.peers.end_destroyed(destroyed), &["taken out of another loop"]);
    drop(loops.peers.take_out(there).unwrap());
    says(loops.peers.remove(there), &["what Loop::take_out returned was dropped"]);
    loops.finish();
}

#[test]
fn shared_receives_are_of_one_context_and_one_loop_and_send_nothing() {
    let mut loops = Loops::on(Software::new());
    let device = Software::new();
    let elsewhere = domain(&device);
    const FOREIGN: &[&str] = &["ibv_create_srq", "of two contexts"];
    says(loops.here.add_shared_receives(&elsewhere, 4), FOREIGN);
    let reactor = Reactor::new(loops.domain.context_parent(), 64).unwrap();
    says(reactor.add_shared_receives(&elsewhere, 4), FOREIGN);
    let receives = loops.here.add_shared_receives(&loops.domain, 4).unwrap();
    let of_reactor = reactor.add_shared_receives(&loops.domain, 4).unwrap();
    let sharing = || loops.here.create_sharing_channel(&loops.domain, receives).unwrap();
    const OF_LOOP: &[&str] = &["Loop::create_sharing_channel", "Reactor::prepare_sharing"];
    says(reactor.prepare(sharing()), OF_LOOP);
    says(reactor.prepare_sharing(sharing(), &of_reactor), OF_LOOP);
    const SENDS: &[&str] = &["shared receives send nothing"];
    let send = SendWorkRequest::new(loops.filled(1));
    says(loops.here.post(receives, send, 0), SENDS);
    const NOT_CONNECTED: &[&str] = &["these are shared receives"];
    let endpoint = Channel::builder(&loops.domain).build().unwrap().endpoint();
    says(loops.here.handshake(receives, endpoint), NOT_CONNECTED);
    says(loops.here.take_out(receives).map(drop), NOT_CONNECTED);
    drop((of_reactor, reactor, elsewhere));
    device.assert_clean();
    loops.finish();
}

#[test]
fn lengths_and_limits_are_named_with_the_method_that_sets_them() {
    let mut pair = Pair::new();
    let (shared, mut region) = (pair.shared(8), pair.region(256, 0));
    let one = &mut pair.one;
    says(one.send(Inline(&[0; 500])), &["max_inline_data", "is 500", "0..="]);
    let pieces: Vec<_> = (0..4).map(|n| region.slice(n..n + 1).unwrap()).collect();
    says(one.send(pieces), &["the number of pieces is 4", "0..=3"]);
    let long = ReadWorkRequest::new(region.slice_mut(..128).unwrap(), shared.remote());
    says(one.run(long), &["128", "64"]);
    // A read of less than the region reads so much.
    shared.write(0, &[0x0707_0707_0707_0707; 8]).unwrap();
    one.read(region.slice_mut(..16).unwrap(), shared.remote()).unwrap();
    assert_eq!((region[15], region[16]), (7, 16));
    let write = WriteWorkRequest::new(region.slice(..65).unwrap(), shared.remote());
    says(one.run(write), &["65", "64"]);
    drop((shared, region));
    pair.finish();
}

#[test]
fn what_is_too_small_is_named_where_it_was_said() {
    let device = Software::new();
    let domain = domain(&device);
    let reactor = Reactor::new(domain.context_parent(), 16).unwrap();
    says(reactor.prepare(builder(&domain).max_send_wr(64)), &["`entries`", "is 68", "0..=16"]);
    says(reactor.datagrams(DatagramsBuilder::new(&domain)), &["`entries`", "is 32", "0..=16"]);
    let queue_pair_type = ibverbs::QueuePairType::UnreliableDatagram;
    let wrong = Channel::builder(&domain).queue_pair_type(queue_pair_type).build();
    says(wrong, &["RC or UC", "Loop::add_datagrams"]);
    says(Channel::builder(&domain).max_send_wr(1 << 30).build(), &["max_send_wr"]);
    let pool = BufferPool::new(&domain, 64, 1, AccessFlags::REMOTE_READ);
    says(pool, &["BufferPool::shared"]);
    let pool = BufferPool::new(&domain, 8, 1, AccessFlags::empty()).unwrap();
    says(pool.take_from(b"too long for it"), &["is 15", "0..=8"]);
    let only = pool.take().unwrap();
    says(pool.take_from(b"too long for it"), &["is 15", "0..=8"]);
    drop(only);
    drop((pool, reactor, domain));
    device.assert_clean();
}

/// An error with an object is an error for `?`, and shows the object.
#[test]
fn a_state_error_is_converted_and_names_its_object() {
    fn step(
        channel: Channel<'static>,
        here: &mut Loop<'static, PooledBuffer>,
    ) -> TransportResult<()> {
        here.add(channel)?;
        Ok(())
    }
    let device = Software::new();
    let domain = domain(&device);
    let mut here = Loop::<PooledBuffer>::new(domain.context_parent(), 64).unwrap();
    let (one, two) = connect(builder(&domain), builder(&domain));
    says(step(one, &mut here), &["Loop::add", "create_channel of the same loop"]);
    let failed = here.add(two).unwrap_err();
    assert_eq!(failed.to_string(), failed.error.to_string());
    let two = failed.object;
    let (mut two, error) = (two, std::io::Error::from(TransportError::Stopped));
    assert_eq!(error.kind(), std::io::ErrorKind::NotConnected);
    // A channel of a loop, used as one that polls itself.
    let (mut of_loop, _peer) = connect(here.create_channel(&domain), here.create_channel(&domain));
    says(of_loop.send(Inline(b"mine")), &["created by a loop", "Loop::add"]);
    let _ = two.until(std::time::Instant::now()).receive(()).unwrap_err();
    says(two.send(()), &["stopped by an earlier failure", "reset"]);
    drop((two, of_loop, _peer, here, domain));
    device.assert_clean();
}

#[test]
fn who_is_called_and_with_what_is_looked_at_first() {
    let device = Software::new();
    let domain = domain(&device);
    let prepared = builder(&domain).build().unwrap();
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(9);
    // Nothing listens there: the private data is checked before that is noticed.
    let failed = prepared.connect("127.0.0.1:1", &vec![0; 1 << 20], deadline).unwrap_err();
    assert_eq!(
        failed.error.to_string(),
        "the private data has 1048576 bytes, and must not have more than 8192"
    );
    assert!(!failed.error.is_retryable() && !failed.error.is_peer_gone());
    let failed = failed.object.connect("127.0.0.1", b"", deadline).unwrap_err();
    says(Err::<(), _>(&failed.error), &["HOST:PORT"]);
    let failed = failed.object.connect("127.0.0.1:1", b"", deadline).unwrap_err();
    says(Err::<(), _>(&failed.error), &["no TCP connection to 127.0.0.1:1"]);
    assert!(failed.error.is_retryable() && !failed.error.is_peer_gone());
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let failed = failed.object.accept(&listener, &[0; 8193], deadline).unwrap_err();
    says(Err::<(), _>(&failed.error), &["8193 bytes"]);
    // This client closes its connection at once.
    drop(std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap());
    let failed = failed.object.accept(&listener, b"", deadline).unwrap_err();
    assert!(failed.error.is_retryable() && failed.error.is_peer_gone(), "{}", failed.error);
    drop((failed, domain));
    device.assert_clean();
}

#[test]
fn a_domain_of_another_device_and_a_queue_that_was_not_built_are_named() {
    let (device, other) = (Software::new(), Software::new());
    let (domain, elsewhere) = (domain(&device), domain(&other));
    let mut here = Loop::<PooledBuffer>::new(domain.context_parent(), 64).unwrap();
    const WORDS: &[&str] = &["of two contexts", "open the device once"];
    says(here.create_channel(&elsewhere).build(), WORDS);
    says(here.add_datagrams(DatagramsBuilder::new(&elsewhere)), WORDS);
    let reactor = Reactor::new(domain.context_parent(), 64).unwrap();
    says(reactor.prepare(builder(&elsewhere)), WORDS);
    let end = here.add_datagrams(DatagramsBuilder::new(&domain)).unwrap();
    let itself = here.endpoint(end).unwrap();
    says(here.handshake(end, itself), &["a datagram end has no peer", "send_to"]);
    says(here.keep_alive(end), &["reliable connection"]);
    let v6 = "ff0e::1".parse().unwrap();
    says(here.group(end, v6), &["no RoCE v2 GID", "family of addresses"]);
    let (mut deaf, _peer) = connect(builder(&domain).max_recv_wr(0), builder(&domain));
    let full = deaf.receive(()).unwrap_err();
    assert_eq!(full, TransportError::QueueFull);
    says(Err::<(), _>(full), &["build the channel deeper", "max_recv_wr"]);
    drop((deaf, _peer, reactor, here, domain, elsewhere));
    device.assert_clean();
    other.assert_clean();
}

/// If the device refuses access, the error names the setting to change and its side.
#[test]
fn rights_that_were_not_given_are_named() {
    let mut pair = Pair::new();
    let closed =
        ibverbs::SharedMemoryRegion::<u64>::new(&pair.domain, 8, AccessFlags::LOCAL_WRITE).unwrap();
    says(pair.one.write(Inline(b"x"), closed.remote()), &["RemoteAccess", "AccessFlags"]);
    says(pair.one.send(()), &["Flushed", "failed before this one"]);
    drop(closed);
    pair.finish();
    let mut pair = Pair::with(Software::new(), |builder| builder.access(AccessFlags::LOCAL_WRITE));
    let open = pair.shared(8);
    let words = &["RemoteInvalidRequest", "allow_remote_rw", "receive is too short"];
    says(pair.one.write(Inline(b"x"), open.remote()), words);
    drop(open);
    pair.finish();
}
