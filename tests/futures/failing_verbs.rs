//! Channels that end while verbs fail: a buffer that the device may still use is leaked, with all that it needs.

use std::future::Future;
use std::sync::Arc;

use ibverbs::{
    AsyncChannel, BufferPool, OwnedResult, PooledBuffer, ProtectionDomain, Reactor,
    RemoteMemoryRegion, TransportError, ffi,
};
use ibverbs_function_device::{FunctionDevice, Kind};

use crate::rig::{
    CHUNKS, Count, LEN, Rig, completions, connect, exchange, filled, poll, poll_in, posted, serve,
};

type Operation = Box<dyn Future<Output = OwnedResult<PooledBuffer>> + Unpin>;

/// One operation of each kind: those whose buffer the device reads, and those whose buffer it writes.
const OPERATIONS: [fn(&Rig, RemoteMemoryRegion) -> Operation; 4] = [
    |rig, _| Box::new(rig.one.send(rig.buffer(1))),
    |rig, remote| Box::new(rig.one.write(rig.buffer(1), remote)),
    |rig, remote| Box::new(rig.one.read(rig.buffer(1), remote)),
    |rig, _| Box::new(rig.one.receive(rig.buffer(1))),
];

/// Why a channel ends.
#[derive(Clone, Copy, PartialEq, Debug)]
enum End {
    ChannelDropped,
    ReactorStopped,
    ReactorDropped,
    PollFails,
    CompletionOfNothing,
}

const ENDS: [End; 5] = [
    End::ChannelDropped,
    End::ReactorStopped,
    End::ReactorDropped,
    End::PollFails,
    End::CompletionOfNothing,
];

/// What is left of a rig.
struct Rest {
    reactor: Option<Reactor>,
    two: AsyncChannel,
    pool: BufferPool,
    domain: Arc<ProtectionDomain<'static>>,
}

fn serve_if_any(device: &FunctionDevice, reactor: Option<&Reactor>) {
    device.run();
    reactor.into_iter().for_each(|reactor| serve(device, reactor));
}

/// How often each verb was called that destroys a parent of a channel.
fn parents_destroyed(device: &FunctionDevice) -> [u64; 3] {
    ["destroy_cq", "dealloc_pd", "free_context"].map(|verb| device.calls(verb))
}

impl End {
    /// The first channel of the rig ends.
    fn come(self, rig: Rig) -> Rest {
        let Rig { one, two, reactor, pool, domain, device } = rig;
        let number = one.number();
        let mut reactor = Some(reactor);
        let turn = || _ = reactor.as_ref().unwrap().turn();
        match self {
            Self::ChannelDropped => {
                drop(one);
                turn();
            }
            Self::ReactorStopped => reactor.as_ref().unwrap().stop(TransportError::Stopped),
            Self::ReactorDropped => reactor = None,
            Self::PollFails => {
                device.fail("poll_cq").errno(libc::EIO).times(1);
                poll(&mut one.shutdown()).expect("it has ended");
            }
            Self::CompletionOfNothing => {
                let nothing = ffi::ibv_wc { wr_id: 4711, qp_num: number, ..Default::default() };
                device.inject(completions(&device), &nothing);
                turn();
            }
        }
        Rest { reactor, two, pool, domain }
    }
}

/// The operation in flight has ended, and its buffer did not come back.
#[track_caller]
fn is_leaked(operation: &mut Operation) {
    let failure = poll(operation).expect("it has ended").unwrap_err();
    assert!(failure.buffer.is_none(), "the device may still use it: {failure}");
    assert_eq!(poll(operation).unwrap().unwrap_err().error, TransportError::UnknownWork);
}

#[test]
fn a_buffer_is_leaked_if_nothing_takes_it_back_from_the_device() {
    for end in ENDS {
        for (kind, make) in OPERATIONS.into_iter().enumerate() {
            for dropped in [false, true] {
                eprintln!("{end:?}, operation {kind}, dropped: {dropped}");
                let rig = Rig::new();
                let target = rig.target();
                let mut operation = Some(posted(make(&rig, target.remote())));
                let (number, device) = (rig.one.number(), rig.device.clone());
                let in_flight = device.outstanding(number);
                assert_eq!(in_flight.0 + in_flight.1, 1);
                operation = operation.filter(|_| !dropped);
                for verb in ["modify_to_reset", "destroy_qp"] {
                    device.fail(verb).errno(libc::EIO).always();
                }
                let rest = end.come(rig);
                assert_eq!(device.outstanding(number), in_flight, "the device still has it");
                operation.iter_mut().for_each(is_leaked);
                assert_eq!(rest.pool.available(), CHUNKS - 1);
                // It is carried out late, in memory that is still there, if the peer still is.
                device.clear_faults();
                let Rest { reactor, two, pool, domain, .. } = rest;
                let mut receive = two.receive(pool.take().unwrap());
                let mut send = two.send(pool.take().unwrap());
                let peer = (poll(&mut receive).is_none(), poll(&mut send).is_none());
                serve_if_any(&device, reactor.as_ref());
                if peer == (true, true) {
                    assert_eq!(device.outstanding(number), (in_flight.0 - u32::from(kind < 3), 0));
                }
                drop((operation, receive, send, two));
                serve_if_any(&device, reactor.as_ref());
                drop(reactor);
                assert_eq!(pool.available(), CHUNKS - 1);
                drop((pool, domain, target));
                device.run();
                // The verb was called once for each queue pair. What is left has kept its parents and the pool.
                let left = if peer == (true, true) { 1 } else { 2 };
                assert_eq!((device.live(Kind::QueuePair), device.calls("destroy_qp")), (left, 2));
                assert_eq!(parents_destroyed(&device), [0; 3]);
                assert_eq!(device.live(Kind::MemoryRegion), 1);
                assert_eq!(device.violations().0, 0, "{}", device.violations().1);
            }
        }
    }
}

/// Where one of the two verbs works, the device is done with the buffers: they come back, once.
#[test]
fn a_buffer_comes_back_if_the_queue_pair_was_reset_or_destroyed() {
    for end in ENDS {
        for make in OPERATIONS {
            for failing in ["modify_qp", "destroy_qp"] {
                let rig = Rig::new();
                let target = rig.target();
                let mut operation = posted(make(&rig, target.remote()));
                let dropped = posted(make(&rig, target.remote()));
                drop(dropped);
                let device = rig.device.clone();
                device.fail(failing).errno(libc::EIO).always();
                let rest = end.come(rig);
                let failure = poll(&mut operation).expect("it has ended").unwrap_err();
                let is_whole = failure.buffer.as_ref().is_some_and(|buffer| buffer[..] == [1; LEN]);
                assert!(is_whole, "{end:?}, {failing}: {failure}");
                drop((failure, operation));
                serve_if_any(&device, rest.reactor.as_ref());
                assert_eq!(rest.pool.available(), CHUNKS);
                assert_eq!(device.violations().0, 0, "{}", device.violations().1);
            }
        }
    }
}

#[test]
fn a_reactor_goes_on_with_other_channels_when_one_cannot_be_destroyed() {
    let Rig { one, two, reactor, pool, domain, device } = Rig::new();
    let number = one.number();
    let buffer = |byte| filled(&pool, byte);
    let [before, last] = [(); 2].map(|()| connect(&reactor, &domain));
    let waiting = Arc::new(Count::default());
    let mut receive = last[1].receive(buffer(0));
    assert!(poll_in(&mut receive, &waiting).is_none());
    let [left, ..] = [(); 3].map(|()| posted(one.send(buffer(2))));
    for verb in ["modify_to_reset", "destroy_qp"] {
        device.fail(verb).errno(libc::EIO).always();
    }
    drop(one);
    while reactor.turn().unwrap() > 0 {}
    assert_eq!((device.calls("destroy_qp"), device.outstanding(number)), (1, (3, 0)));
    assert_eq!(pool.available(), CHUNKS - 4);
    device.clear_faults();
    let mut left: Operation = Box::new(left);
    is_leaked(&mut left);
    drop(left);

    // Those that were there, and those that take the place of the one that is gone.
    let fresh = connect(&reactor, &domain);
    for _ in 0..10 {
        for [one, two] in [&before, &fresh] {
            exchange([one, two], &device, &reactor, &pool);
            exchange([two, one], &device, &reactor, &pool);
        }
    }
    // What the one that is gone had in flight is carried out, and its completions are nobody's.
    let receives = [(); 2].map(|()| posted(two.receive(buffer(0))));
    let mut own = fresh.each_ref().map(|channel| posted(channel.receive(buffer(0))));
    serve(&device, &reactor);
    for mut receive in receives {
        assert_eq!(poll(&mut receive).expect("it has ended").unwrap().0[..], [2; LEN]);
    }
    assert!(own.iter_mut().all(|own| poll(own).is_none()), "ended by another one's completion");
    let mut send = posted(last[0].send(buffer(3)));
    serve(&device, &reactor);
    assert_eq!(waiting.get(), 1);
    poll(&mut receive).expect("it has ended").unwrap();
    poll(&mut send).expect("it has ended").unwrap();
    drop((receive, own, send, two, before, last, fresh));
    serve(&device, &reactor);
    assert_eq!(pool.available(), CHUNKS - 3, "the three of the queue pair that is left");
    assert_eq!((device.live(Kind::QueuePair), device.calls("destroy_qp")), (1, 8));
    drop((reactor, pool, domain));
    assert_eq!(parents_destroyed(&device), [0; 3], "parents of what is left");
    assert_eq!(device.violations().0, 0, "{}", device.violations().1);
}

/// A reactor is dropped while the queue pairs of all its channels cannot be destroyed.
#[test]
fn a_reactor_that_is_dropped_destroys_nothing_twice() {
    let rig = Rig::new();
    let target = rig.target();
    let operations = OPERATIONS.map(|make| posted(make(&rig, target.remote())));
    let Rig { one, two, reactor, pool, domain, device } = rig;
    for verb in ["modify_to_reset", "destroy_qp"] {
        device.fail(verb).errno(libc::EIO).always();
    }
    drop(reactor);
    for mut operation in operations {
        is_leaked(&mut operation);
    }
    assert_eq!(device.calls("destroy_qp"), 2);
    drop((one, two, domain));
    assert_eq!(device.calls("destroy_qp"), 2);
    assert_eq!(pool.available(), CHUNKS - 4);
    device.clear_faults();
    device.run();
    drop((pool, target));
    assert_eq!((device.live(Kind::QueuePair), parents_destroyed(&device)), (2, [0; 3]));
    assert_eq!(device.violations().0, 0, "{}", device.violations().1);
}

#[test]
fn futures_return_the_error_of_a_stopped_reactor_though_the_queue_pair_had_to_be_destroyed() {
    let rig = Rig::new();
    let mut send = posted(rig.one.send(rig.buffer(1)));
    rig.device.fail("modify_qp").errno(libc::EIO).always();
    rig.reactor.stop(TransportError::TimedOut);
    let ended = poll(&mut send).expect("it has ended").unwrap_err();
    assert_eq!((ended.error, ended.buffer.is_some()), (TransportError::TimedOut, true));
}
