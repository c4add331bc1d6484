//! Faults with the completion status of the standard (Soft-RoCE reports another one), and a device
//! without free resources.

use crate::figures::figure;
use crate::pair::{Pair, builder, domain};
use crate::software::Software;
use ibverbs::{
    AccessFlags, Channel, CompareSwapWorkRequest, ErrorKind, FetchAddWorkRequest, MemoryRegion,
    RemoteMemoryRegion, SharedMemoryRegion, TransportError, WorkStatus, completion::WorkErrorClass,
};

fn status(error: TransportError) -> WorkStatus {
    error.work_error().unwrap_or_else(|| panic!("{error}")).status()
}

#[test]
fn a_message_that_does_not_fit_is_a_length_error() {
    let mut pair = Pair::new();
    let (outgoing, mut incoming) = (pair.region(16, 1), pair.region(24, 0));
    incoming.fill(0xcc);
    let (one, two) = (&mut pair.one, &mut pair.two);
    let ended = two.scope(|s| {
        let (short, behind) = incoming.slice_mut(..)?.split_at(15)?;
        let (short, behind) = (s.post_receive(short)?, s.post_receive(behind)?);
        let sent = one.send(outgoing.slice(..)?).unwrap_err();
        let received = short.wait().map(drop).unwrap_err();
        let flushed = behind.wait().map(drop).unwrap_err();
        Ok::<_, TransportError>([received, sent, flushed].map(status))
    });
    let length = [WorkStatus::LocalLength, WorkStatus::RemoteInvalidRequest, WorkStatus::Flushed];
    assert_eq!(ended, Ok(length));
    assert_eq!(incoming[15..], [0xcc; 9], "it ran over its end");
    let mut pair = pair.reconnect();
    pair.exchange();
    drop((outgoing, incoming));
    pair.finish();
    figure(
        "short-receive",
        "as the standard has it: LocalLength at the receiver, RemoteInvalidRequest at the sender, \
         Flushed for what comes after; reset, connected again and data moved; nothing left",
    );
}

#[test]
fn a_peer_without_the_right_to_it_changes_nothing() {
    let mut pair = Pair::new();
    let mut refused = 0;
    let mut local = pair.region(8, 1);
    let new = |access| SharedMemoryRegion::<u64>::new(&pair.domain, 4, access).unwrap();
    let (open, closed) = (new(crate::pair::ALL), new(AccessFlags::REMOTE_READ));
    for region in [&open, &closed] {
        region.fill(0x77);
    }
    let remote = open.remote();
    let wrong = RemoteMemoryRegion::new(remote.address(), 8, remote.rkey() ^ 0x5a00).unwrap();
    let outside = RemoteMemoryRegion::new(remote.address() + 32, 8, remote.rkey()).unwrap();
    let over = RemoteMemoryRegion::new(remote.address() + 28, 8, remote.rkey()).unwrap();
    for target in [wrong, outside, over, closed.remote().sub_region(0, 8).unwrap()] {
        for request in 0..4 {
            let write = |channel: &mut Channel<'_>, local: &mut MemoryRegion<'_, u8>| match request
            {
                0 => channel.write(local.slice(..).unwrap(), target),
                1 => channel.run(FetchAddWorkRequest::new(
                    &mut local.slice_mut(..).unwrap(),
                    target,
                    1,
                )),
                2 => channel.run(CompareSwapWorkRequest::new(
                    &mut local.slice_mut(..).unwrap(),
                    target,
                    0x77,
                    1,
                )),
                _ => channel.read(&mut local.slice_mut(..).unwrap(), target),
            };
            // A peer may read what it may not write. Atomics must be aligned.
            let unaligned = target.address() % 8 != 0 && (request == 1 || request == 2);
            if unaligned || request == 3 && target.rkey() == closed.rkey() {
                continue;
            }
            let error = write(&mut pair.one, &mut local).unwrap_err();
            assert_eq!(error.work_error().unwrap().class(), WorkErrorClass::Remote, "{error}");
            assert_eq!(status(error), WorkStatus::RemoteAccess, "{request} of {target:?}");
            assert_eq!((open.to_vec(), closed.to_vec()), (vec![0x77; 4], vec![0x77; 4]));
            assert!(local.iter().copied().eq(1..9), "the requester's memory has changed");
            assert_eq!(status(pair.one.send(()).unwrap_err()), WorkStatus::Flushed);
            pair = pair.reconnect();
            refused += 1;
        }
    }
    pair.exchange();
    drop((open, closed, local));
    pair.finish();
    assert_eq!(refused, 4 + 4 + 2 + 3);
}

#[test]
fn a_device_that_has_run_out_of_queue_pairs_says_so() {
    let device = Software::with(|builder| builder.max_qp(2));
    let domain = domain(&device);
    let channels = [(); 2].map(|()| builder(&domain).build().unwrap());
    for _ in 0..10 {
        let error = builder(&domain).build().map(drop).unwrap_err();
        assert_eq!((error.verb(), error.kind()), ("ibv_create_qp", ErrorKind::Resource));
        assert!(error.to_string().contains("the device has none left"), "{error}");
        assert_eq!(device.live_objects().completion_queues, 2, "the queue made for it is gone");
    }
    drop(channels);
    drop(builder(&domain).build().unwrap());
    drop(domain);
    device.assert_clean();
    figure(
        "no-queue-pairs",
        "10 times one too many for the device: Resource ('the device has none left'); the completion \
         queues made for them are gone; works again when one is given back; nothing left",
    );
}
