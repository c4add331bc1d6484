//! Unpolled operations, which the program polls by hand.

use ibverbs::channel::ChannelClosed;
use ibverbs::completion::WorkOpcode;
use ibverbs::{
    CompareSwapWorkRequest, FetchAddWorkRequest, Inline, ReadWorkRequest, ReceiveWorkRequest,
    SendWorkRequest, TransportError, WriteWorkRequest, completion::WorkErrorClass,
};
use ibverbs_software::Verb;

use crate::pair::{Pair, outstanding, soon};
use crate::software::Software;

#[test]
fn work_outlives_scopes_and_blocking_calls() {
    let mut pair = Pair::new();
    let (outgoing, mut incoming) = (pair.region(8, 3), pair.region(16, 0));
    let target = pair.shared(1);
    let (first, second) = incoming.slice_mut(..).unwrap().split_at(8).unwrap();
    let (mut first, mut second) = (first, second);
    // SAFETY: the slices are not touched before the work has ended.
    let (mut one, mut two) = unsafe {
        (
            pair.two.post_unpolled(ReceiveWorkRequest::new(&mut first)).unwrap(),
            pair.two.post_unpolled(ReceiveWorkRequest::new(&mut second)).unwrap(),
        )
    };
    assert!(one.poll(&mut pair.two).is_none());
    // A scope does not wait for operations that it did not post, even when it stops because of an error.
    pair.two.scope(|s| s.post_write(Inline(&[1; 8]), target.remote())?.wait().map(drop)).unwrap();
    pair.two.scope(|_| Err::<(), _>(())).unwrap_err();
    pair.two.write(Inline(&[2; 8]), target.remote()).unwrap();
    pair.two.manual_scope(|_| Ok::<_, ()>(())).unwrap();
    pair.one.send(outgoing.slice(..4).unwrap()).unwrap();
    pair.one.send(outgoing.slice(..).unwrap()).unwrap();
    // This poll finds the completion of the first receive, too.
    assert!(two.poll(&mut pair.two).unwrap().is_ok());
    let result = one.poll(&mut pair.two).unwrap().unwrap();
    assert_eq!((result.byte_len(), result.opcode()), (4, WorkOpcode::Receive));
    // A result is handed out once. By then the slot belongs to another operation.
    assert_eq!(one.poll(&mut pair.two).unwrap().unwrap_err(), TransportError::UnknownWork);
    assert_eq!(two.wait(&mut pair.two).unwrap_err(), TransportError::UnknownWork);
    assert_eq!(incoming[8..], outgoing[..]);
    drop((outgoing, incoming, target));
    pair.finish();
}

/// The rule of the unpolled operations: parts of the region that no operation has are free to use.
#[test]
fn other_parts_of_the_region_stay_in_use() {
    let mut pair = Pair::new();
    let (outgoing, mut incoming) = (pair.region(4, 1), pair.region(12, 0));
    // SAFETY: the part is not touched before the work has ended.
    let work = unsafe {
        pair.two.post_unpolled(ReceiveWorkRequest::new(incoming.slice_mut(4..8).unwrap()))
    };
    let work = work.unwrap();
    incoming.slice_mut(..4).unwrap().fill(7);
    pair.one.send(outgoing.slice(..).unwrap()).unwrap();
    // Another operation sends and receives the parts beside it.
    assert_eq!(incoming.slice(..4).unwrap()[..], [7; 4]);
    pair.one
        .scope(|one| {
            let receive = one.post_receive(incoming.slice_mut(8..)?)?;
            pair.two.send(outgoing.slice(..).unwrap()).unwrap();
            receive.wait().map(drop)
        })
        .unwrap();
    work.wait(&mut pair.two).unwrap();
    assert_eq!(incoming[..], [7, 7, 7, 7, 1, 2, 3, 4, 1, 2, 3, 4]);
    drop((outgoing, incoming));
    pair.finish();
}

#[test]
fn a_result_is_handed_out_once_though_its_slot_is_used_again() {
    let mut pair = Pair::new();
    // SAFETY: there is no memory.
    let receive =
        |pair: &mut Pair| unsafe { pair.two.post_unpolled(ReceiveWorkRequest::new(())) }.unwrap();
    let mut first = receive(&mut pair);
    pair.one.send(()).unwrap();
    first.poll(&mut pair.two).unwrap().unwrap();
    // Once through all slots.
    let mut others = [(); 4].map(|()| receive(&mut pair));
    for n in 0..4 {
        pair.one.run(SendWorkRequest::new(&()).immediate(n)).unwrap();
    }
    for _ in 0..5 {
        assert_eq!(first.poll(&mut pair.two).unwrap().unwrap_err(), TransportError::UnknownWork);
        let _ = others[0].poll(&mut pair.two);
    }
    for (other, n) in others.into_iter().zip(0..4).skip(1) {
        assert_eq!(other.wait(&mut pair.two).unwrap().immediate(), Some(n));
    }
    pair.finish();
}

#[test]
fn every_kind_can_be_posted() {
    let mut pair = Pair::new();
    let target = pair.shared(2);
    let remote = target.remote();
    let word = remote.sub_region(0, 8).unwrap();
    let mut region = pair.region(8, 1);
    let mut sink = pair.region(16, 0);
    for part in [0..8, 8..16] {
        let mut part = sink.slice_mut(part).unwrap();
        // SAFETY: the region outlives the channel, and is not touched.
        let _ = unsafe { pair.two.post_unpolled(ReceiveWorkRequest::new(&mut part)) }.unwrap();
    }
    let one = &mut pair.one;
    let mut part = region.slice_mut(..).unwrap();
    // SAFETY: each is waited for before the region is touched.
    unsafe {
        one.post_unpolled(SendWorkRequest::new(&part)).unwrap().wait(one).unwrap();
        one.post_unpolled(SendWorkRequest::new(&part).immediate(1)).unwrap().wait(one).unwrap();
        one.post_unpolled(WriteWorkRequest::new(&part, word)).unwrap().wait(one).unwrap();
        one.post_unpolled(ReadWorkRequest::new(&mut part, word))
            .unwrap()
            .wait_until(one, soon())
            .unwrap();
        one.post_unpolled(FetchAddWorkRequest::new(&mut part, word, 1)).unwrap().wait(one).unwrap();
        one.post_unpolled(CompareSwapWorkRequest::new(&mut part, word, 0, 1))
            .unwrap()
            .wait(one)
            .unwrap();
        let waits = one.post_unpolled(WriteWorkRequest::new(&part, word).immediate(1)).unwrap();
        assert_eq!(waits.wait_until(one, soon()).unwrap_err(), TransportError::TimedOut);
    }
    assert_eq!(outstanding(&pair.device, &pair.one), (0, 0));
    drop(pair.two);
    drop((target, region, sink, pair.one, pair.domain));
    pair.device.assert_clean();
}

#[test]
fn work_is_of_one_channel() {
    let mut pair = Pair::new();
    let mut region = pair.region(8, 0);
    // SAFETY: the region outlives the channel, and is not touched.
    let mut work =
        unsafe { pair.one.post_unpolled(ReceiveWorkRequest::new(region.slice_mut(..).unwrap())) }
            .unwrap();
    assert_eq!(work.poll(&mut pair.two).unwrap().unwrap_err(), TransportError::UnknownWork);
    assert!(work.poll(&mut pair.one).is_none());
    assert_eq!(work.wait(&mut pair.two).unwrap_err(), TransportError::UnknownWork);
    assert_eq!(outstanding(&pair.device, &pair.one), (0, 1));
    drop(pair.one);
    drop((region, pair.two, pair.domain));
    pair.device.assert_clean();
}

#[test]
fn a_failed_poll_leaves_work_in_flight() {
    let mut pair = Pair::new();
    // SAFETY: there is no memory.
    let mut work = unsafe { pair.one.post_unpolled(ReceiveWorkRequest::new(())) }.unwrap();
    pair.device.fail_next(Verb::PollCq, libc::EIO);
    assert!(matches!(work.poll(&mut pair.one), Some(Err(TransportError::Verbs(_)))));
    assert!(work.poll(&mut pair.one).is_none());
    assert_eq!(outstanding(&pair.device, &pair.one), (0, 1));
    pair.device.fail_next(Verb::PollCq, libc::EIO);
    assert!(matches!(work.wait(&mut pair.one), Err(TransportError::Verbs(_))));
    assert_eq!(outstanding(&pair.device, &pair.one), (0, 0));
    pair.finish();
}

#[test]
fn a_stopped_channel_has_flushed_its_work() {
    let mut pair = Pair::new();
    // SAFETY: there is no memory.
    let mut work = unsafe { pair.one.post_unpolled(ReceiveWorkRequest::new(())) }.unwrap();
    pair.one.until(soon()).receive(()).unwrap_err();
    let error = work.poll(&mut pair.one).unwrap().unwrap_err();
    assert_eq!(error.work_error().unwrap().class(), WorkErrorClass::Flushed);
    let mut pair = pair.reconnect();
    // SAFETY: there is no memory.
    let mut work = unsafe { pair.one.post_unpolled(ReceiveWorkRequest::new(())) }.unwrap();
    let mut pair = pair.reconnect();
    // SAFETY: there is no memory.
    let mut new = unsafe { pair.one.post_unpolled(ReceiveWorkRequest::new(())) }.unwrap();
    // The new work uses the same slot.
    assert_eq!(work.poll(&mut pair.one).unwrap().unwrap_err(), TransportError::Stopped);
    assert!(new.poll(&mut pair.one).is_none());
    pair.two.send(()).unwrap();
    new.wait(&mut pair.one).unwrap();
    pair.finish();
}

#[test]
fn the_queue_is_full_for_all_alike() {
    let mut pair = Pair::with(Software::manual(), |builder| builder);
    // SAFETY: there is no memory.
    let work: Vec<_> =
        (0..4).map(|_| unsafe { pair.one.post_unpolled(ReceiveWorkRequest::new(())) }).collect();
    // SAFETY: there is no memory.
    let fifth = unsafe { pair.one.post_unpolled(ReceiveWorkRequest::new(())) };
    assert_eq!(fifth.unwrap_err(), TransportError::QueueFull);
    assert_eq!(pair.one.receive(()).unwrap_err(), TransportError::QueueFull);
    let scoped = pair.one.scope(|s| s.post_receive(()).map(drop));
    assert_eq!(TransportError::from(scoped.unwrap_err()), TransportError::QueueFull);
    assert_eq!(pair.device.calls(Verb::PostRecv), 4);
    drop(work);
    let Pair { one, two, domain, device } = pair;
    assert_eq!(one.close().unwrap(), ChannelClosed::Flushed(4));
    assert_eq!(two.close().unwrap(), ChannelClosed::Drained);
    drop(domain);
    device.assert_clean();
}

#[test]
fn closing_says_what_became_of_the_work() {
    let mut pair = Pair::new();
    // SAFETY: there is no memory.
    let work = unsafe {
        (
            pair.two.post_unpolled(ReceiveWorkRequest::new(())),
            pair.two.post_unpolled(ReceiveWorkRequest::new(())),
        )
    };
    pair.one.send(()).unwrap();
    pair.one.send(()).unwrap();
    drop(work);
    let Pair { one, two, domain, device } = pair;
    // Both have arrived, whether or not the program asked.
    assert_eq!(two.close().unwrap(), ChannelClosed::Drained);
    device.fail_next(Verb::DestroyQp, libc::EBUSY);
    assert_eq!(one.close().unwrap_err().raw_os_error(), Some(libc::EBUSY));
    drop(domain);
    // The destroy verb is called once for each. The parents of the leaked one are leaked too.
    let calls = [Verb::DestroyQp, Verb::DestroyCq, Verb::DeallocPd];
    assert_eq!(calls.map(|verb| device.calls(verb)), [2, 1, 0]);
    assert_eq!((device.live_objects().contexts, device.early_deregistrations()), (1, 0));
}

#[test]
fn dropping_a_channel_ends_its_work() {
    let mut pair = Pair::new();
    let mut region = pair.region(8, 0);
    // SAFETY: the region outlives the channel.
    drop(
        unsafe { pair.one.post_unpolled(ReceiveWorkRequest::new(region.slice_mut(..).unwrap())) }
            .unwrap(),
    );
    // The reset succeeds, and the destroy verb fails, so the queue pair is leaked.
    pair.device.fail_next(Verb::DestroyQp, libc::EBUSY);
    let number = pair.one.number();
    drop(pair.one);
    assert_eq!(pair.device.outstanding(number), Some((0, 0)));
    drop(region);
    assert_eq!(pair.device.early_deregistrations(), 0);
    assert_eq!(pair.device.live_objects().memory_regions, 0);
    assert_eq!(pair.device.calls(Verb::DestroyQp), 1);
}
