//! Blocking operations, one after the other.

use std::time::{Duration, Instant};

use ibverbs::completion::WorkOpcode;
use ibverbs::{
    AccessFlags, Channel, CompareSwapWorkRequest, ErrorKind, FetchAddWorkRequest, Inline,
    MemoryRegion, QueuePairType, SendWorkRequest, SharedMemoryRegion, TransportError, WorkStatus,
    WriteWorkRequest,
    completion::WorkErrorClass,
    ffi,
    settings::{MaxRnrRetries, MaximumTransferUnit, PacketSequenceNumber},
};
use ibverbs_function_device::FunctionDevice;
use ibverbs_software::Verb;

use crate::pair::{ModelPair, Pair, builder, connect, domain, outstanding, soon};
use crate::software::Software;

#[test]
fn messages_arrive_with_length_and_immediate() {
    let mut pair = Pair::new();
    let outgoing = pair.region(64, 0);
    let mut incoming = pair.region(256, 0);
    let (one, two) = (&mut pair.one, &mut pair.two);
    std::thread::scope(|threads| {
        threads.spawn(|| {
            let sent = one.send(outgoing.slice(..48).unwrap()).unwrap();
            assert_eq!(sent.opcode(), WorkOpcode::Send);
            one.run(SendWorkRequest::new(&outgoing.slice(8..16).unwrap()).immediate(0xdead_beef))
                .unwrap();
            one.run(SendWorkRequest::new(&()).immediate(7)).unwrap();
            one.send(Inline(b"no region needed")).unwrap();
            // The request that is prepared for all sends is unchanged.
            one.send(outgoing.slice(..48).unwrap()).unwrap();
        });
        let mut receive = |at: usize| {
            let mut slice = incoming.slice_mut(at..).unwrap();
            let received = two.receive(&mut slice).unwrap();
            assert_eq!(received.opcode(), WorkOpcode::Receive);
            (received.byte_len(), received.immediate())
        };
        assert_eq!(receive(0), (48, None));
        assert_eq!(receive(64), (8, Some(0xdead_beef)));
        assert_eq!(receive(80), (0, Some(7)));
        assert_eq!(receive(128), (16, None));
        assert_eq!(receive(200), (48, None));
    });
    assert_eq!(incoming[..48], outgoing[..48]);
    assert_eq!(incoming[64..72], outgoing[8..16]);
    assert_eq!(&incoming[128..144], b"no region needed");
    drop((outgoing, incoming));
    pair.finish();
}

#[test]
fn several_pieces_are_one_message() {
    let mut pair = Pair::new();
    let outgoing = pair.region(64, 0);
    let mut header = MemoryRegion::<u64>::new(&pair.domain, 1).unwrap();
    let mut body = pair.region(32, 0);
    let (one, two) = (&mut pair.one, &mut pair.two);
    std::thread::scope(|threads| {
        threads.spawn(|| {
            let part = |range| outgoing.slice(range).unwrap();
            one.send([part(40..44), part(0..8), part(20..24)]).unwrap();
            one.send((part(0..1), part(2..3))).unwrap();
        });
        let mut both = (header.slice_mut(..).unwrap(), body.slice_mut(..).unwrap());
        assert_eq!(two.receive(&mut both).unwrap().byte_len(), 16);
        assert_eq!(two.receive(body.slice_mut(16..18).unwrap()).unwrap().byte_len(), 2);
    });
    assert_eq!(header[0].to_ne_bytes(), [40, 41, 42, 43, 0, 1, 2, 3]);
    assert_eq!(body[..8], [4, 5, 6, 7, 20, 21, 22, 23]);
    assert_eq!(body[16..18], [0, 2]);
    drop((outgoing, header, body));
    pair.finish();
}

#[test]
fn one_sided_operations_need_nobody_on_the_other_side() {
    let mut pair = Pair::new();
    let target = pair.shared(8);
    let remote = target.remote();
    let mut local = MemoryRegion::<u64>::new(&pair.domain, 4).unwrap();
    local.copy_from_slice(&[11, 12, 13, 14]);
    let one = &mut pair.one;
    one.write(local.slice(..).unwrap(), remote.sub_region(16, 32).unwrap()).unwrap();
    one.write(Inline(&99_u64.to_ne_bytes()), remote).unwrap();
    let mut seen = [0; 8];
    target.read(0, &mut seen).unwrap();
    assert_eq!(seen, [99, 0, 11, 12, 13, 14, 0, 0]);

    let read = one.read(&mut local.slice_mut(..2).unwrap(), remote.sub_region(24, 16).unwrap());
    assert_eq!((read.unwrap().opcode(), local[..2].to_vec()), (WorkOpcode::Read, vec![12, 13]));

    let counter = remote.sub_region(0, 8).unwrap();
    let mut old = local.slice_mut(..1).unwrap();
    one.run(FetchAddWorkRequest::new(&mut old, counter, 5)).unwrap();
    assert_eq!(old[0], 99);
    one.run(CompareSwapWorkRequest::new(&mut old, counter, 104, 1)).unwrap();
    assert_eq!(old[0], 104);
    one.run(CompareSwapWorkRequest::new(&mut old, counter, 104, 2)).unwrap();
    assert_eq!((old[0], target.read_one(0).unwrap()), (1, 1));

    // A region that peers may access is also a buffer on this side.
    let near = pair.shared(4);
    let mut slice = near.slice(..).unwrap();
    pair.one.read(&mut slice, remote.sub_region(16, 32).unwrap()).unwrap();
    assert_eq!(near.to_vec(), [11, 12, 13, 14]);
    drop((target, local, near));
    pair.finish();
}

#[test]
fn a_write_with_immediate_uses_up_a_receive() {
    let mut pair = Pair::new();
    let target = pair.shared(1);
    let remote = target.remote();
    let bytes = pair.region(8, 1);
    let (one, two) = (&mut pair.one, &mut pair.two);
    std::thread::scope(|threads| {
        threads.spawn(|| {
            one.run(WriteWorkRequest::new(&bytes.slice(..).unwrap(), remote).immediate(42)).unwrap()
        });
        let told = two.receive(()).unwrap();
        assert_eq!(told.opcode(), WorkOpcode::ReceiveWriteWithImmediate);
        assert_eq!((told.immediate(), told.byte_len()), (Some(42), 8));
    });
    assert_eq!(target.read_one(0).unwrap().to_ne_bytes(), bytes[..]);
    drop((target, bytes));
    pair.finish();
}

#[test]
fn bad_input_is_refused_before_the_device_sees_it() {
    let mut pair = Pair::new();
    let target = pair.shared(2);
    let remote = target.remote();
    let mut region = pair.region(64, 0);
    let one = &mut pair.one;
    let check = |result: Result<ibverbs::completion::WorkSuccess, TransportError>, words: &str| {
        let TransportError::Verbs(error) = result.unwrap_err() else { panic!("not {words}") };
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
        assert!(error.to_string().contains(words), "{error}");
    };
    let piece = region.slice(..1).unwrap();
    check(one.send([piece; 4]), "the number of pieces is 4, and must be within 0..=3");
    check(
        one.write(region.slice(..17).unwrap(), remote),
        "the length, for the remote region, is 17",
    );
    check(one.send(Inline(&[0; 2000])), "the length of inline data is 2000");
    check(one.read(&mut region.slice_mut(..17).unwrap(), remote), "within 0..=16");
    let mut seven = region.slice_mut(..7).unwrap();
    check(one.run(FetchAddWorkRequest::new(&mut seven, remote, 1)), "of an atomic's buffer is 7");
    let mut eight = region.slice_mut(..8).unwrap();
    let odd = remote.sub_region(4, 8).unwrap();
    check(one.run(CompareSwapWorkRequest::new(&mut eight, odd, 0, 1)), "not a multiple of 8");
    let short = remote.sub_region(8, 4).unwrap();
    check(one.run(FetchAddWorkRequest::new(&mut eight, short, 1)), "within 0..=4");
    assert_eq!(pair.device.calls(Verb::PostSend), 0);
    // The channel still works.
    pair.one.read(&mut region.slice_mut(..16).unwrap(), remote).unwrap();
    drop((target, region));
    pair.finish();
}

#[test]
fn an_unreliable_connection_writes_but_does_not_read() {
    let mut pair = Pair::with(Software::new(), |builder| {
        builder.queue_pair_type(QueuePairType::UnreliableConnected)
    });
    let target = pair.shared(1);
    let mut region = pair.region(8, 3);
    pair.one.write(region.slice(..).unwrap(), target.remote()).unwrap();
    // The write has been sent, and may still be on its way.
    pair.device.run();
    assert_eq!(target.read_one(0).unwrap().to_ne_bytes(), region[..]);
    let posts = pair.device.calls(Verb::PostSend);
    let error = pair.one.read(&mut region.slice_mut(..).unwrap(), target.remote()).unwrap_err();
    let TransportError::Verbs(error) = error else { panic!("{error}") };
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert_eq!(pair.device.calls(Verb::PostSend), posts);
    drop((target, region));
    pair.finish();
}

#[test]
fn only_connected_types_make_a_channel() {
    let device = Software::new();
    let domain = domain(&device);
    let datagram = builder(&domain).queue_pair_type(QueuePairType::UnreliableDatagram).build();
    assert_eq!(datagram.unwrap_err().kind(), ErrorKind::InvalidInput);
    for (send, receive) in [(0, 0), (u32::MAX, u32::MAX), (1 << 20, 1)] {
        let built = Channel::builder(&domain).max_send_wr(send).max_recv_wr(receive).build();
        assert_eq!(built.unwrap_err().kind(), ErrorKind::InvalidInput, "{send} {receive}");
    }
    drop(domain);
    device.assert_clean();
}

#[test]
fn a_failed_operation_is_told_and_the_next_is_its_consequence() {
    let device = Software::new();
    let domain = domain(&device);
    let impatient = |domain| builder(domain).max_rnr_retries(MaxRnrRetries::NONE);
    let (one, two) = connect(impatient(&domain), impatient(&domain));
    let mut pair = Pair { one, two, domain, device };
    let region = pair.region(8, 0);
    let slice = region.slice(..).unwrap();
    let error = pair.one.send(slice).unwrap_err();
    assert_eq!(error.work_error().unwrap().status(), WorkStatus::RnrRetryExceeded);
    assert!(!error.is_consequence());
    let error = pair.one.send(slice).unwrap_err();
    assert_eq!(error.work_error().unwrap().class(), WorkErrorClass::Flushed);
    assert!(error.is_consequence());
    let mut pair = pair.reconnect();
    pair.exchange();
    drop(region);
    pair.finish();
}

#[test]
fn a_post_that_the_device_refuses_is_not_in_flight() {
    let mut pair = Pair::new();
    let mut region = pair.region(8, 0);
    for _ in 0..10 {
        pair.device.fail_next(Verb::PostSend, libc::EIO);
        let error = pair.one.send(region.slice(..).unwrap()).unwrap_err();
        assert!(matches!(error, TransportError::Verbs(e) if e.verb() == "ibv_post_send"));
        pair.device.fail_next(Verb::PostRecv, libc::ENOMEM);
        let error = pair.one.receive(region.slice_mut(..).unwrap()).unwrap_err();
        assert!(error.is_queue_full(), "{error}");
        pair.device.fail_next(Verb::PostSend, libc::EIO);
        let scope = pair.one.scope(|s| s.post_send(region.slice(..)?).map(drop));
        assert!(scope.is_err());
    }
    assert_eq!(outstanding(&pair.device, &pair.one), (0, 0));
    pair.exchange();
    drop(region);
    pair.finish();
}

#[test]
fn a_receive_that_never_arrives_ends_at_its_deadline() {
    let mut pair = Pair::new();
    let mut region = pair.region(8, 0);
    let start = Instant::now();
    let error = pair.one.until(soon()).receive(region.slice_mut(..).unwrap()).unwrap_err();
    assert_eq!(error, TransportError::TimedOut);
    assert!((20..60_000).contains(&start.elapsed().as_millis()), "{:?}", start.elapsed());
    assert_eq!(outstanding(&pair.device, &pair.one), (0, 0));
    let error = pair.one.send(region.slice(..).unwrap()).unwrap_err();
    assert_eq!(error, TransportError::Stopped);
    let mut pair = pair.reconnect();
    pair.exchange();
    drop(region);
    pair.finish();
}

#[test]
fn a_deadline_that_has_passed_takes_what_is_there() {
    let mut pair = ModelPair::new();
    let region = pair.region(8, 0);
    let past = Instant::now() - Duration::from_millis(1);
    let target = pair.shared(1);
    // The model executes it in the first poll.
    pair.one.until(past).write(region.slice(..).unwrap(), target.remote()).unwrap();
    let error = pair.one.until(past).send(region.slice(..).unwrap()).unwrap_err();
    assert_eq!(error, TransportError::TimedOut);
    drop((region, target));
    pair.finish();
}

#[test]
fn every_blocking_method_has_a_deadline() {
    let mut pair = Pair::new();
    let target = pair.shared(1);
    let (remote, mut region) = (target.remote(), pair.region(8, 0));
    let later = Instant::now() + Duration::from_secs(60);
    let (mut bytes, one) = (region.slice_mut(..).unwrap(), &mut pair.one);
    one.until(later).write(&bytes, remote).unwrap();
    one.until(later).write(Inline(&[1; 8]), remote).unwrap();
    one.until(later).read(&mut bytes, remote).unwrap();
    one.until(later).run(CompareSwapWorkRequest::new(&mut bytes, remote, 0, 1)).unwrap();
    one.until(later).run(FetchAddWorkRequest::new(&mut bytes, remote, 1)).unwrap();
    // These wait for the peer, which does nothing.
    let time_out = |call: &mut dyn FnMut(&mut Channel<'_>) -> TransportError| {
        let mut fresh = Pair::new();
        assert_eq!(call(&mut fresh.one), TransportError::TimedOut);
        assert_eq!(outstanding(&fresh.device, &fresh.one), (0, 0));
        fresh.finish();
    };
    time_out(&mut |c| c.until(soon()).send(()).unwrap_err());
    time_out(&mut |c| c.until(soon()).run(SendWorkRequest::new(&()).immediate(1)).unwrap_err());
    time_out(&mut |c| c.until(soon()).send(Inline(b"x")).unwrap_err());
    let nothing = remote.sub_region(0, 0).unwrap();
    one.until(soon()).run(WriteWorkRequest::new(&(), nothing).immediate(1)).unwrap_err();
    drop((region, target));
    pair.finish();
}

/// Sequence numbers and the MTU may be set after the queue pair was created, and set again for each
/// connection.
/// `&region` is all of the region, as the verbs layer's `post_send(&region, ..)` takes it.
#[test]
fn whole_regions_are_buffers() {
    let mut pair = Pair::new();
    let (outgoing, mut incoming) = (pair.region(16, 1), pair.region(16, 0));
    let mut shared = pair.shared(2);
    let (one, two) = (&mut pair.one, &mut pair.two);
    one.scope(|one| {
        two.scope(|two| {
            let receive = two.post_receive(&mut incoming)?;
            one.post(SendWorkRequest::new(&outgoing).immediate(1))?.wait()?;
            let (region, success) = receive.wait()?;
            assert_eq!((success.byte_len(), &region[..]), (16, &outgoing[..]));
            let receive = two.post_receive(&mut shared)?;
            one.post_send(&outgoing)?.wait()?;
            receive.wait().map(drop)
        })
        .unwrap();
        Ok::<_, TransportError>(())
    })
    .unwrap();
    let mut back = pair.region(16, 0);
    pair.two.read(&mut back, shared.remote()).unwrap();
    assert_eq!(back[..], outgoing[..]);
    drop((outgoing, incoming, shared, back));
    pair.finish();
}

#[test]
fn what_is_agreed_with_the_peer_is_set_before_the_handshake() {
    let pair = ModelPair::new();
    let device = pair.device.clone();
    let [here, there] = [0x111, 0x222].map(|psn| PacketSequenceNumber::new(psn).unwrap());
    let mtu = MaximumTransferUnit::Mtu256;
    let (one, two) = (pair.one.reset().unwrap(), pair.two.reset().unwrap());
    let one = one.set_send_psn(here).receive_psn(there).path_mtu(mtu);
    let two = two.set_send_psn(there).receive_psn(one.send_psn()).path_mtu(mtu);
    let (to_one, to_two) = (one.endpoint(), two.endpoint());
    let one = one.handshake(to_two).unwrap();
    let attributes = |back| device.call_before("modify_qp", back).unwrap().qp_attr;
    assert_eq!((attributes(1).rq_psn, attributes(0).sq_psn), (0x222, 0x111));
    assert_eq!(attributes(1).path_mtu, ffi::ibv_mtu::IBV_MTU_256);
    let mut pair = ModelPair { one, two: two.handshake(to_one).unwrap(), ..pair };
    pair.exchange();
    pair.finish();
}

/// The words of flow control, too.
#[test]
fn on_iwarp_peers_may_write_the_words_that_they_answer_reads_with() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    for (kind, written) in [
        (ffi::ibv_transport_type::IBV_TRANSPORT_IB, AccessFlags::empty()),
        (ffi::ibv_transport_type::IBV_TRANSPORT_IWARP, AccessFlags::REMOTE_WRITE),
    ] {
        // SAFETY: the device is live, and nothing else uses it meanwhile.
        unsafe { (*(*context.as_raw()).device).transport_type = kind };
        drop(Channel::builder(&domain).flow_control(true).build().unwrap());
        let expected = AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_READ | written;
        assert_eq!(device.last_call("reg_mr").unwrap().access, expected.bits());
    }
}

/// On iWARP the peer answers a read by a write to the memory, whose rkey it is told.
#[test]
fn on_iwarp_a_read_fills_only_memory_that_peers_may_write() {
    let device = FunctionDevice::model();
    let context = device.context();
    let access = AccessFlags::REMOTE_READ | AccessFlags::REMOTE_WRITE;
    let domain = context.alloc_pd().unwrap();
    // SAFETY: the device is live, and nothing else uses it meanwhile.
    let is_of = |kind| unsafe { (*(*context.as_raw()).device).transport_type = kind };
    is_of(ffi::ibv_transport_type::IBV_TRANSPORT_IWARP);
    let prepared = Channel::builder(&domain).max_send_sge(2).access(access).build().unwrap();
    // Without the connection manager, only others connect.
    is_of(ffi::ibv_transport_type::IBV_TRANSPORT_IB);
    let own = prepared.endpoint();
    let mut channel = prepared.handshake(own).unwrap();

    let target = SharedMemoryRegion::<u8>::new(&domain, 8, access).unwrap();
    let open = SharedMemoryRegion::<u8>::new(&domain, 8, access).unwrap();
    let mut private = MemoryRegion::<u8>::new(&domain, 8).unwrap();
    let remote = target.remote();
    target.write(0, &[7; 8]).unwrap();
    let error = channel.read(private.slice_mut(..).unwrap(), remote).unwrap_err();
    assert!(error.to_string().contains("iWARP"), "{error}");
    let both = (open.slice(..4).unwrap(), private.slice_mut(..4).unwrap());
    let error = channel.read(both, remote).unwrap_err();
    assert!(error.to_string().contains("iWARP"), "{error}");
    channel.read(open.slice(..).unwrap(), remote).unwrap();
    let parts = [open.slice(..4).unwrap(), open.slice(4..).unwrap()];
    channel.read(parts, remote).unwrap();
    assert_eq!((open.to_vec(), private[..].to_vec()), (vec![7; 8], vec![0; 8]));
}
