//! Owned operations whose post fails although the device may have the request: the buffer comes back when the device is
//! done with it, and never otherwise. Nothing aborts, since the channel can keep the buffer.

use std::sync::Arc;

use ibverbs::{
    AccessFlags, BufferPool, FetchAddWorkRequest, Inline, OperationError, PooledBuffer,
    ProtectionDomain, ReadWorkRequest, ReceiveWorkRequest, RemoteMemoryRegion, SendWorkRequest,
    TransportError, WriteWorkRequest,
};
use ibverbs_function_device::{FunctionDevice, Kind, Progress};

use crate::lost_doorbell;
use crate::pair::{ModelPair as Pair, builder, connect, outstanding};

const CHUNKS: usize = 8;

/// Posts an operation on the first channel, which fails.
type Post = fn(&mut Pair, PooledBuffer, RemoteMemoryRegion) -> OperationError<PooledBuffer>;

/// With the verb that posts it.
const POSTS: [(&str, Post); 7] = [
    ("ibv_post_recv", |pair, buffer, _| {
        pair.one.post_owned(ReceiveWorkRequest::new(buffer)).unwrap_err()
    }),
    ("ibv_post_send", |pair, buffer, remote| {
        pair.one.post_owned(ReadWorkRequest::new(buffer, remote)).unwrap_err()
    }),
    ("ibv_post_send", |pair, buffer, remote| {
        pair.one.post_owned(FetchAddWorkRequest::new(buffer, remote, 1)).unwrap_err()
    }),
    ("ibv_post_send", |pair, buffer, _| {
        pair.one.post_owned(SendWorkRequest::new(buffer)).unwrap_err()
    }),
    ("ibv_post_send", |pair, buffer, _| {
        pair.one.post_owned(SendWorkRequest::new(buffer).immediate(1)).unwrap_err()
    }),
    ("ibv_post_send", |pair, buffer, remote| {
        pair.one.post_owned(WriteWorkRequest::new(buffer, remote)).unwrap_err()
    }),
    ("ibv_post_send", |pair, buffer, remote| {
        pair.one.post_owned(WriteWorkRequest::new(buffer, remote).immediate(1)).unwrap_err()
    }),
];

/// On a device that executes requests when the test says so, and then accesses the memory that they name whether or not
/// it still exists.
fn pair() -> (Pair, BufferPool) {
    let device = FunctionDevice::model();
    device.progress(Progress::Manual);
    device.stale_translation(true);
    let context = device.context();
    lost_doorbell::prepare(&context);
    let domain = Arc::new(ProtectionDomain::new(Arc::new(context)).unwrap());
    let pool = BufferPool::new(&domain, 8, CHUNKS, AccessFlags::empty()).unwrap();
    let (one, two) = connect(builder(&domain), builder(&domain));
    (Pair { one, two, domain, device }, pool)
}

fn filled(pool: &BufferPool, byte: u8) -> PooledBuffer {
    let mut buffer = pool.take().unwrap();
    buffer.fill(byte);
    buffer
}

/// The post of the operation is queued, and fails without naming the request.
#[track_caller]
fn fail(
    (verb, post): (&str, Post),
    pair: &mut Pair,
    pool: &BufferPool,
    remote: RemoteMemoryRegion,
) -> Option<PooledBuffer> {
    match verb {
        "ibv_post_send" => pair.device.fail("ring_doorbell").errno(libc::EACCES).times(1),
        _ => lost_doorbell::fail_next_receive(),
    }
    let failed = post(pair, filled(pool, 1), remote);
    let TransportError::Verbs(error) = failed.error else { panic!("{failed}") };
    assert_eq!((error.verb(), error.raw_os_error()), (verb, Some(libc::EACCES)));
    let refused = pair.one.post_owned(SendWorkRequest::new(filled(pool, 6))).unwrap_err();
    assert_eq!(refused.error, TransportError::Stopped);
    assert_eq!(refused.buffer.expect("it was not posted")[..], [6; 8]);
    failed.buffer
}

/// With others in flight: one with a handle, and two whose handles were dropped.
#[test]
fn the_buffer_comes_back_with_the_error_once_the_queue_pair_was_flushed_or_reset() {
    for failing in [None, Some("modify_to_err")] {
        for operation in POSTS {
            let (mut pair, pool) = pair();
            let target = pair.shared(1);
            let mut handle =
                pair.one.post_owned(ReceiveWorkRequest::new(filled(&pool, 2))).unwrap();
            drop(pair.one.post_owned(SendWorkRequest::new(filled(&pool, 3))).unwrap());
            drop(pair.one.post_owned(ReceiveWorkRequest::new(filled(&pool, 4))).unwrap());
            if let Some(verb) = failing {
                pair.device.fail(verb).errno(libc::EIO).times(1);
            }
            let buffer = fail(operation, &mut pair, &pool, target.remote());
            assert_eq!(outstanding(&pair.device, &pair.one), (0, 0), "the device still has it");
            assert_eq!(buffer.expect("the device is done with it")[..], [1; 8]);
            let ended = handle.poll(&mut pair.one).unwrap_err();
            assert!(ended.error.is_consequence(), "{ended}");
            assert_eq!(ended.buffer.expect("the device is done with it")[..], [2; 8]);
            pair.one.poll().unwrap();
            assert_eq!(pool.available(), CHUNKS);
            drop((handle, target));
            let mut pair = pair.reconnect();
            pair.device.progress(Progress::OnPoll);
            pair.exchange();
            drop(pool);
            pair.finish();
        }
    }
}

/// What ends the wait for a buffer that the channel has kept.
#[derive(Clone, Copy, PartialEq, Debug)]
enum End {
    /// The device carries the request out, and its completion is polled.
    Completes,
    /// The channel is dropped, and its queue pair destroyed.
    Destroyed,
    /// The same, but the verb fails.
    Left,
    /// The channel is reset.
    Reset,
}

#[test]
fn the_channel_keeps_the_buffer_while_the_queue_pair_can_be_neither_flushed_nor_reset() {
    for end in [End::Completes, End::Destroyed, End::Left, End::Reset] {
        for operation in POSTS {
            let (mut pair, pool) = pair();
            let target = pair.shared(1);
            pair.device.fail("modify_qp").errno(libc::EIO).always();
            let buffer = fail(operation, &mut pair, &pool, target.remote());
            assert!(buffer.is_none(), "the device may still use it");
            let in_flight = outstanding(&pair.device, &pair.one);
            assert_eq!(in_flight.0 + in_flight.1, 1, "the device still has it");
            assert_eq!(pool.available(), CHUNKS - 1);
            for _ in 0..3 {
                pair.one.poll().unwrap();
            }
            assert_eq!(pool.available(), CHUNKS - 1, "{end:?}: nothing has ended it");
            pair.device.clear_faults();
            match end {
                End::Completes => {
                    drop(pair.two.post_owned(ReceiveWorkRequest::new(filled(&pool, 9))).unwrap());
                    drop(pair.two.post_owned(SendWorkRequest::new(filled(&pool, 8))).unwrap());
                    pair.device.run();
                    pair.one.poll().unwrap();
                    assert_eq!(outstanding(&pair.device, &pair.one), (0, 0));
                    drop(pair.two);
                    assert_eq!(pool.available(), CHUNKS);
                    drop(pair.one);
                }
                End::Destroyed => {
                    drop(pair.one);
                    assert_eq!(pool.available(), CHUNKS);
                    drop(pair.two);
                }
                End::Reset => {
                    pair = pair.reconnect();
                    assert_eq!(pool.available(), CHUNKS);
                    drop((pair.one, pair.two));
                }
                End::Left => {
                    pair.device.fail("modify_qp").errno(libc::EIO).always();
                    pair.device.fail("destroy_qp").errno(libc::EIO).times(1);
                    drop(pair.one);
                    assert_eq!(pool.available(), CHUNKS - 1, "the device may still use it");
                    // It is carried out late, in memory that is still there.
                    pair.device.clear_faults();
                    drop(pair.two.post_owned(ReceiveWorkRequest::new(filled(&pool, 9))).unwrap());
                    drop(pair.two.post_owned(SendWorkRequest::new(filled(&pool, 8))).unwrap());
                    pair.device.run();
                    drop(pair.two);
                    assert_eq!(pool.available(), CHUNKS - 1);
                }
            }
            drop((target, pool, pair.domain));
            let device = pair.device;
            if end == End::Left {
                assert_eq!((device.live(Kind::QueuePair), device.live(Kind::MemoryRegion)), (1, 1));
                let parents =
                    ["destroy_cq", "dealloc_pd", "free_context"].map(|verb| device.calls(verb));
                assert_eq!(parents, [1, 0, 0], "only the peer's completion queue");
                assert_eq!(device.calls("destroy_qp"), 2, "once for each");
                assert_eq!(device.violations().0, 0, "{}", device.violations().1);
            } else {
                device.assert_clean();
            }
        }
    }
}

/// A request that the provider names was not queued: the channel goes on.
#[test]
fn a_post_that_is_refused_gives_the_buffer_back_and_stops_nothing() {
    let (mut pair, pool) = pair();
    let mut receive = pair.one.post_owned(ReceiveWorkRequest::new(filled(&pool, 2))).unwrap();
    pair.device.fail("post_send").errno(libc::EACCES).times(1);
    let refused = pair.one.post_owned(SendWorkRequest::new(filled(&pool, 1))).unwrap_err();
    assert_eq!(refused.buffer.expect("it was not posted")[..], [1; 8]);
    pair.device.fail("post_recv").errno(libc::EACCES).times(1);
    let refused = pair.one.post_owned(ReceiveWorkRequest::new(filled(&pool, 1))).unwrap_err();
    assert_eq!(refused.buffer.expect("it was not posted")[..], [1; 8]);
    assert!(receive.poll(&mut pair.one).unwrap().is_none());
    pair.device.progress(Progress::OnPoll);
    pair.two.send(Inline(&[5; 8])).unwrap();
    assert_eq!(receive.wait(&mut pair.one).unwrap().0[..], [5; 8]);
    drop((receive, pool));
    pair.exchange();
    pair.finish();
}
