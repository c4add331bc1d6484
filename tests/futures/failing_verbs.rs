//! Channels that end while verbs fail: a buffer that the device may still use is leaked, with all that it needs.

use std::future::Future;
use std::pin::Pin;

use ibverbs::channel::OwnedResult;
use ibverbs::future::{Local, Locked, Share};
use ibverbs::{PooledBuffer, RemoteMemoryRegion, SharedMemoryRegion, TransportError};
use ibverbs_function_device::Kind;

use crate::rig::{ALL, CHUNKS, LEN, Rig, both, connect, filled, poll, posted};

type Operation<'a> = Pin<Box<dyn Future<Output = OwnedResult<PooledBuffer>> + 'a>>;

/// One operation of each kind: those whose buffer the device reads, and those whose buffer it writes.
fn operations<S: Share<Buffer = PooledBuffer>>(
    rig: &Rig<S>,
    remote: RemoteMemoryRegion,
) -> [Operation<'_>; 4] {
    [
        Box::pin(rig.one.send(rig.buffer(1))),
        Box::pin(rig.one.write(rig.buffer(1), remote)),
        Box::pin(rig.one.read(rig.buffer(1), remote)),
        Box::pin(rig.one.receive(rig.buffer(1))),
    ]
}

/// The ways of a channel to end while its futures are there.
#[derive(Clone, Copy, Debug)]
enum End {
    Stopped,
    ReactorDropped,
    ShutDown,
}

const ENDS: [End; 3] = [End::Stopped, End::ReactorDropped, End::ShutDown];

/// How often each verb was called that destroys a parent of a channel.
fn parents_destroyed(device: &ibverbs_function_device::FunctionDevice) -> [u64; 3] {
    ["destroy_cq", "dealloc_pd", "free_context"].map(|verb| device.calls(verb))
}

both! {
    /// Where one of the two verbs works, the device is done with the buffers: they come back, once. If none does, they are
    /// leaked with all that they need, and the device may use them late.
    fn a_buffer_comes_back_when_the_device_is_done_with_it() -> R {
        for end in ENDS {
            for failing in [&["modify_qp"][..], &["destroy_qp"], &["modify_qp", "destroy_qp"]] {
                for which in 0..4 {
                    let rig = R::<S>::new();
                    let target = SharedMemoryRegion::<u8>::new(&rig.domain, LEN, ALL).unwrap();
                    let mut operation = operations(&rig, target.remote()).into_iter().nth(which).unwrap();
                    assert!(poll(&mut operation).is_none());
                    // A shutdown waits for what is not a receive.
                    let end = if which < 3 && matches!(end, End::ShutDown) { End::Stopped } else { end };
                    for verb in failing {
                        rig.device.fail(verb).errno(libc::EIO).always();
                    }
                    let R::<S> { one, reactor, pool, device, .. } = &rig;
                    let what = format!("{end:?}, {failing:?}, operation {which}");
                    let error = match end {
                        End::Stopped => {
                            reactor.stop(TransportError::TimedOut);
                            TransportError::TimedOut
                        }
                        End::ShutDown => {
                            poll(&mut Box::pin(one.shutdown())).expect("nothing is in flight");
                            TransportError::Stopped
                        }
                        // The channels live on.
                        End::ReactorDropped => TransportError::ReactorGone,
                    };
                    let can_reset = failing == ["destroy_qp"];
                    if let End::ReactorDropped = end {
                        drop(operation);
                        let R::<S> { one, two, reactor, pool, domain, device } = rig;
                        drop(reactor);
                        assert_eq!(pool.available(), CHUNKS - usize::from(!can_reset || which == 3), "{what}");
                        drop((one, two, domain, target));
                        let left = usize::from(failing.len() == 2);
                        assert_eq!(pool.available(), CHUNKS - left, "{what}");
                        device.clear_faults();
                        device.run();
                        assert_eq!(device.violations().0, 0, "{what}: {}", device.violations().1);
                        continue;
                    }
                    let ended = poll(&mut operation).expect("it has ended").unwrap_err();
                    assert_eq!(ended.error, error, "{what}");
                    let is_back = ended.buffer.map(|buffer| buffer[..] == [1; LEN]);
                    assert_eq!(is_back, can_reset.then_some(true), "{what}");
                    assert_eq!(poll(&mut operation).unwrap().unwrap_err().error, TransportError::UnknownWork);
                    drop(operation);
                    assert_eq!(pool.available(), CHUNKS - usize::from(!can_reset), "{what}");
                    let _ = device;
                    let R::<S> { one, two, reactor, pool, domain, device } = rig;
                    drop((one, two));
                    // Destroying is as good as resetting; if both fail, nobody gets the buffer.
                    let left = usize::from(failing.len() == 2);
                    assert_eq!(pool.available(), CHUNKS - left, "{what}");
                    device.clear_faults();
                    device.run();
                    drop((reactor, pool, domain, target));
                    assert_eq!(device.violations().0, 0, "{what}: {}", device.violations().1);
                    if failing.len() == 2 {
                        assert_eq!(parents_destroyed(&device), [0; 3], "{what}");
                    }
                }
            }
        }
    }

    /// Channels that were connected before the failure, and after it, go on.
    fn others_go_on_when_a_channel_cannot_be_destroyed() -> R {
        let R::<S> { one, two, reactor, pool, domain, device } = R::<S>::new();
        let number = one.number();
        let before = connect(&reactor, &domain, |builder| builder);
        let sends = [2; 3].map(|byte| posted(one.send(filled(&pool, byte))));
        drop(sends);
        for verb in ["modify_to_reset", "destroy_qp"] {
            device.fail(verb).errno(libc::EIO).always();
        }
        drop(one);
        assert_eq!((device.calls("destroy_qp"), device.outstanding(number)), (1, (3, 0)));
        assert_eq!(pool.available(), CHUNKS - 3);
        device.clear_faults();
        let fresh = connect(&reactor, &domain, |builder| builder);
        let serve = || {
            device.run();
            while reactor.turn().unwrap() > 0 {}
        };
        for byte in 0..10 {
            for [one, two] in [&before, &fresh] {
                let mut receive = posted(two.receive(filled(&pool, 0)));
                let mut send = posted(one.send(filled(&pool, byte)));
                serve();
                poll(&mut send).unwrap().unwrap();
                assert_eq!(poll(&mut receive).unwrap().unwrap().0[..], [byte; LEN]);
            }
        }
        // The device carries out the sends of the channel that is gone. Their completions end
        // nothing of other channels.
        let receives = [(); 2].map(|()| posted(two.receive(filled(&pool, 0))));
        let mut own = fresh.each_ref().map(|channel| posted(channel.receive(filled(&pool, 0))));
        serve();
        for mut receive in receives {
            assert_eq!(poll(&mut receive).unwrap().unwrap().0[..], [2; LEN]);
        }
        assert!(own.iter_mut().all(|own| poll(own).is_none()), "ended by another one's completion");
        drop((own, two, before));
        drop(fresh);
        assert_eq!(pool.available(), CHUNKS - 3, "the three of the queue pair that is left");
        assert_eq!((device.live(Kind::QueuePair), device.calls("destroy_qp")), (1, 6));
        drop((reactor, pool, domain));
        assert_eq!(parents_destroyed(&device), [0; 3], "parents of what is left");
        assert_eq!(device.violations().0, 0, "{}", device.violations().1);
    }
}
