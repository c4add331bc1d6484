//! Posts that fail although the device may have the request: the future that has posted ends with that error, and with
//! it all others of its channel.

use std::future::Future;
use std::sync::Arc;

use ibverbs::{
    OperationError, OwnedResult, PooledBuffer, Reactor, RemoteMemoryRegion, TransportError,
};
use ibverbs_function_device::{FunctionDevice, Kind};

use crate::lost_doorbell;
use crate::rig::{CHUNKS, Count, LEN, Rig, connect, exchange, poll, poll_in, posted, serve};

/// Posts an operation on the first channel, which fails.
type Post = fn(&Rig, RemoteMemoryRegion) -> OperationError<PooledBuffer>;

/// The first poll of a future, whose post fails.
#[track_caller]
fn failed<F>(mut future: F) -> OperationError<PooledBuffer>
where
    F: Future<Output = OwnedResult<PooledBuffer>> + Unpin,
{
    let failed = poll(&mut future).expect("it could not be posted").unwrap_err();
    assert_eq!(poll(&mut future).unwrap().unwrap_err().error, TransportError::UnknownWork);
    failed
}

/// With the verb that posts it, and whether the request may be a receive.
const POSTS: [(&str, Post); 5] = [
    ("ibv_post_send", |rig, _| failed(rig.one.send(rig.buffer(1)))),
    ("ibv_post_send", |rig, remote| failed(rig.one.write(rig.buffer(1), remote))),
    ("ibv_post_send", |rig, remote| failed(rig.one.read(rig.buffer(1), remote))),
    ("ibv_post_recv", |rig, _| failed(rig.one.receive(rig.buffer(1)))),
    ("ibv_post_recv", |rig, _| rig.one.post_receive(rig.buffer(1)).unwrap_err()),
];

/// The next post of the verb is queued, and fails without naming the request.
fn lose_doorbell(device: &FunctionDevice, verb: &str) {
    match verb {
        "ibv_post_send" => device.fail("ring_doorbell").errno(libc::EACCES).times(1),
        _ => lost_doorbell::fail_next_receive(),
    }
}

fn is_refused_by(error: TransportError, verb: &str) -> bool {
    matches!(error, TransportError::Verbs(error)
        if (error.verb(), error.raw_os_error()) == (verb, Some(libc::EACCES)))
}

/// Two more channels of the reactor, on which messages arrive.
#[track_caller]
fn others_go_on(reactor: &Reactor, others: &[ibverbs::AsyncChannel; 2], rig: &Rig) {
    let [three, four] = others;
    for _ in 0..5 {
        exchange([three, four], &rig.device, reactor, &rig.pool);
        exchange([four, three], &rig.device, reactor, &rig.pool);
    }
}

#[test]
fn a_post_that_may_have_been_queued_ends_every_future_of_its_channel_and_none_of_others() {
    for (verb, post) in POSTS {
        let rig = Rig::new();
        let (target, number) = (rig.target(), rig.one.number());
        let others = connect(&rig.reactor, &rig.domain);
        let count = Arc::new(Count::default());
        let untouched = Arc::new(Count::default());
        let mut receive = rig.one.receive(rig.buffer(2));
        let mut send = rig.one.send(rig.buffer(3));
        let mut read = rig.one.read(rig.buffer(4), target.remote());
        assert!(poll_in(&mut receive, &count).is_none());
        assert!(poll_in(&mut send, &count).is_none());
        assert!(poll_in(&mut read, &count).is_none());
        let mut elsewhere = others[1].receive(rig.buffer(5));
        assert!(poll_in(&mut elsewhere, &untouched).is_none());
        assert_eq!(rig.device.outstanding(number), (2, 1));

        lose_doorbell(&rig.device, verb);
        let failed = post(&rig, target.remote());
        assert!(is_refused_by(failed.error, verb), "{failed}");
        assert_eq!(rig.device.outstanding(number), (0, 0), "the device still has it");
        assert_eq!(failed.buffer.expect("the queue pair was reset")[..], [1; LEN]);
        // Nobody else would wake them: the device completes nothing of theirs.
        assert_eq!(count.get(), 3, "each is woken once");
        let ends = [
            (poll(&mut receive).expect("it has ended").unwrap_err(), 2),
            (poll(&mut send).expect("it has ended").unwrap_err(), 3),
            (poll(&mut read).expect("it has ended").unwrap_err(), 4),
        ];
        for (ended, byte) in ends {
            assert!(is_refused_by(ended.error, verb), "{ended}");
            assert_eq!(ended.buffer.expect("the queue pair was reset")[..], [byte; LEN]);
        }
        // A future that comes later is told so.
        let late = poll(&mut rig.one.send(rig.buffer(6))).expect("the channel has ended");
        let late = late.unwrap_err();
        assert!(is_refused_by(late.error, verb), "{late}");
        assert_eq!(late.buffer.expect("it was not posted")[..], [6; LEN]);
        let late = rig.one.post_receive(rig.buffer(6)).unwrap_err();
        assert!(is_refused_by(late.error, verb) && late.buffer.is_some(), "{late}");
        drop((receive, send, read, late));
        assert_eq!(rig.pool.available(), CHUNKS - 1);

        assert_eq!(untouched.get(), 0);
        let mut message = posted(others[0].send(rig.buffer(7)));
        serve(&rig.device, &rig.reactor);
        poll(&mut message).expect("it has ended").unwrap();
        assert_eq!(poll(&mut elsewhere).expect("it has arrived").unwrap().0[..], [7; LEN]);
        drop((elsewhere, message));
        others_go_on(&rig.reactor, &others, &rig);
        drop((others, target));
        rig.finish();
    }
}

/// The other futures end too, and no buffer comes back that the device may still use: neither then, nor when the channel
/// is dropped.
#[test]
fn a_post_that_may_have_been_queued_keeps_its_buffer_if_nothing_takes_it_back() {
    for (verb, post) in POSTS {
        let rig = Rig::new();
        let (target, number) = (rig.target(), rig.one.number());
        let others = connect(&rig.reactor, &rig.domain);
        let count = Arc::new(Count::default());
        let mut receive = rig.one.receive(rig.buffer(2));
        let mut send = rig.one.send(rig.buffer(3));
        assert!(poll_in(&mut receive, &count).is_none() && poll_in(&mut send, &count).is_none());
        lose_doorbell(&rig.device, verb);
        for verb in ["modify_qp", "destroy_qp"] {
            rig.device.fail(verb).errno(libc::EIO).always();
        }
        let failed = post(&rig, target.remote());
        rig.device.clear_faults();
        assert!(is_refused_by(failed.error, verb), "{failed}");
        assert!(failed.buffer.is_none(), "the device may still use it");
        let in_flight = rig.device.outstanding(number);
        assert_eq!(in_flight.0 + in_flight.1, 3, "the device still has it");
        assert_eq!(count.get(), 2, "each is woken once");
        for ended in [poll(&mut receive), poll(&mut send)] {
            let ended = ended.expect("it has ended").unwrap_err();
            assert!(is_refused_by(ended.error, verb), "{ended}");
            assert!(ended.buffer.is_none(), "the device may still use it");
        }
        drop((receive, send));
        assert_eq!(rig.pool.available(), CHUNKS - 3);
        others_go_on(&rig.reactor, &others, &rig);
        // What it has is carried out late, in memory that is still there.
        let mut back = [(); 3].map(|()| posted(rig.two.receive(rig.buffer(0))));
        let message = posted(rig.two.send(rig.buffer(8)));
        serve(&rig.device, &rig.reactor);
        assert_eq!(poll(&mut back[0]).expect("it has arrived").unwrap().0[..], [3; LEN]);
        drop((back, message));

        let Rig { one, two, reactor, pool, domain, device } = rig;
        drop(one);
        serve(&device, &reactor);
        assert_eq!(pool.available(), CHUNKS - 5, "the three, and what the peer still waits with");
        drop((two, others));
        serve(&device, &reactor);
        assert_eq!(pool.available(), CHUNKS - 3);
        assert_eq!((device.live(Kind::QueuePair), device.calls("destroy_qp")), (1, 4));
        drop((reactor, pool, domain, target));
        let parents = ["destroy_cq", "dealloc_pd", "free_context"].map(|verb| device.calls(verb));
        assert_eq!((parents, device.live(Kind::MemoryRegion)), ([0; 3], 1));
        assert_eq!(device.violations().0, 0, "{}", device.violations().1);
    }
}

/// The error was returned before it was known that the queue pair can be destroyed, so the buffer goes back to its pool.
#[test]
fn the_buffer_of_a_failed_post_goes_back_to_its_pool_if_only_destroying_works() {
    for (verb, post) in POSTS {
        let rig = Rig::new();
        let target = rig.target();
        let mut receive = posted(rig.one.receive(rig.buffer(2)));
        rig.device.fail("modify_qp").errno(libc::EIO).always();
        lose_doorbell(&rig.device, verb);
        let failed = post(&rig, target.remote());
        rig.device.clear_faults();
        assert!(is_refused_by(failed.error, verb) && failed.buffer.is_none(), "{failed}");
        assert_eq!(rig.device.live(Kind::QueuePair), 1, "its peer's");
        let ended = poll(&mut receive).expect("it has ended").unwrap_err();
        assert_eq!(ended.buffer.expect("the queue pair was destroyed")[..], [2; LEN]);
        drop((receive, target));
        assert_eq!(rig.pool.available(), CHUNKS);
        rig.finish();
    }
}

/// A request that the provider names was not queued: only its future ends.
#[test]
fn a_post_that_is_refused_ends_no_other_future() {
    let rig = Rig::new();
    let count = Arc::new(Count::default());
    let mut receive = rig.one.receive(rig.buffer(2));
    assert!(poll_in(&mut receive, &count).is_none());
    rig.device.fail("post_send").errno(libc::EACCES).times(1);
    let refused = failed(rig.one.send(rig.buffer(1)));
    assert!(is_refused_by(refused.error, "ibv_post_send"), "{refused}");
    assert_eq!(refused.buffer.expect("it was not posted")[..], [1; LEN]);
    rig.device.fail("post_recv").errno(libc::EACCES).times(1);
    let refused = rig.one.post_receive(rig.buffer(1)).unwrap_err();
    assert!(is_refused_by(refused.error, "ibv_post_recv") && refused.buffer.is_some());
    assert_eq!(count.get(), 0);
    let mut message = posted(rig.two.send(rig.buffer(7)));
    serve(&rig.device, &rig.reactor);
    poll(&mut message).expect("it has ended").unwrap();
    assert_eq!(poll(&mut receive).expect("it has arrived").unwrap().0[..], [7; LEN]);
    drop((receive, message, refused));
    exchange([&rig.one, &rig.two], &rig.device, &rig.reactor, &rig.pool);
    rig.finish();
}
