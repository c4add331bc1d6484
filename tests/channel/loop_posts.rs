//! Operations of a loop whose post fails although the device may have the request: the loop keeps the buffer until the
//! device is done with it.

use ibverbs::{
    ChannelId, FetchAddWorkRequest, Loop, OperationError, PooledBuffer, ReadWorkRequest,
    ReceiveWorkRequest, RemoteMemoryRegion, SendWorkRequest, SharedMemoryRegion, TransportError,
    WriteWorkRequest,
};
use ibverbs_function_device::{FunctionDevice, Kind, Progress};

use crate::loops::{Loops, next};
use crate::lost_doorbell;
use crate::pair::{ALL, TestDevice};

/// Posts an operation, which fails.
type Post = fn(
    &mut Loop<'static, PooledBuffer>,
    ChannelId,
    PooledBuffer,
    RemoteMemoryRegion,
) -> Result<(), OperationError<PooledBuffer>>;

/// The ways to post, each with its verb.
const POSTS: [(&str, Post); 7] = [
    ("ibv_post_recv", |of, at, buffer, _| of.post(at, ReceiveWorkRequest::new(buffer), 7)),
    ("ibv_post_send", |of, at, buffer, to| of.post(at, ReadWorkRequest::new(buffer, to), 7)),
    ("ibv_post_send", |of, at, buffer, to| of.post(at, FetchAddWorkRequest::new(buffer, to, 1), 7)),
    ("ibv_post_send", |of, at, buffer, _| of.post(at, SendWorkRequest::new(buffer), 7)),
    ("ibv_post_send", |of, at, buffer, _| {
        of.post(at, SendWorkRequest::new(buffer).immediate(1), 7)
    }),
    ("ibv_post_send", |of, at, buffer, to| of.post(at, WriteWorkRequest::new(buffer, to), 7)),
    ("ibv_post_send", |of, at, buffer, to| {
        of.post(at, WriteWorkRequest::new(buffer, to).immediate(1), 7)
    }),
];

struct Rig {
    loops: Loops<FunctionDevice>,
    channel: ChannelId,
    peer: ChannelId,
    target: SharedMemoryRegion<'static, u64>,
}

impl Rig {
    /// Uses a device that executes requests when the test says so, and then accesses the memory that they name whether
    /// or not it still exists.
    fn new() -> Self {
        let device = FunctionDevice::make();
        device.progress(Progress::Manual);
        device.stale_translation(true);
        let mut loops = Loops::on(device);
        lost_doorbell::prepare(loops.domain.context());
        let (channel, peer) = loops.connect();
        let target = SharedMemoryRegion::new(&loops.domain, 2, ALL).unwrap();
        Self { loops, channel, peer, target }
    }

    /// The post of the operation is queued, and fails without naming the request.
    #[track_caller]
    fn fail(&mut self, (verb, post): (&str, Post)) {
        match verb {
            "ibv_post_send" => self.loops.device.fail("ring_doorbell").errno(libc::EACCES).times(1),
            _ => lost_doorbell::fail_next_receive(),
        }
        let mut buffer = self.loops.filled(1);
        buffer.set_len(8).unwrap();
        let here = &mut self.loops.here;
        let failed = post(here, self.channel, buffer, self.target.remote()).unwrap_err();
        let TransportError::Verbs(error) = failed.error else { panic!("{failed}") };
        assert_eq!((error.verb(), error.raw_os_error()), (verb, Some(libc::EACCES)));
        assert!(failed.buffer.is_none(), "the device may still use it");
    }
}

/// Other requests are in flight meanwhile.
#[test]
fn the_buffer_comes_back_once_the_queue_pair_was_flushed_or_reset() {
    for failing in [None, Some("modify_to_err")] {
        for operation in POSTS {
            let mut rig = Rig::new();
            let loops = &mut rig.loops;
            let receive = ReceiveWorkRequest::new(loops.filled(2));
            loops.here.post(rig.channel, receive, 1).unwrap();
            loops.send(rig.channel, 3, 2);
            if let Some(verb) = failing {
                rig.loops.device.fail(verb).errno(libc::EIO).times(1);
            }
            rig.fail(operation);
            let loops = &mut rig.loops;
            if failing.is_some() {
                loops.here.remove(rig.channel).unwrap();
            }
            let mut tokens = [(); 3].map(|()| {
                let ended = next(&mut loops.here);
                assert!(ended.result().unwrap_err().is_consequence());
                ended.token
            });
            tokens.sort_unstable();
            assert_eq!((tokens, loops.out()), ([1, 2, 7], 0));
            drop(rig.target);
            rig.loops.finish();
        }
    }
}

/// How the wait for a buffer that the loop has kept ends.
#[derive(Clone, Copy, PartialEq, Debug)]
enum End {
    /// The device carries the request out, and its completion is polled.
    Completes,
    /// The channel is removed, and its queue pair destroyed.
    Removed,
    /// The loop is dropped.
    Dropped,
    /// The loop is dropped, but its queue pair cannot be destroyed.
    Left,
}

#[test]
fn the_loop_keeps_the_buffer_while_the_queue_pair_can_be_neither_flushed_nor_reset() {
    for end in [End::Completes, End::Removed, End::Dropped, End::Left] {
        for operation in POSTS {
            let mut rig = Rig::new();
            rig.loops.device.fail("modify_qp").errno(libc::EIO).always();
            rig.fail(operation);
            let Rig { mut loops, channel, peer, target } = rig;
            let number = loops.here.endpoint(channel).unwrap().num();
            let in_flight = loops.device.outstanding(number);
            assert_eq!(in_flight.0 + in_flight.1, 1, "the device still has it");
            for _ in 0..3 {
                assert!(loops.here.next_ended().unwrap().is_none());
            }
            assert_eq!(loops.out(), 1, "{end:?}: nothing has ended it");
            loops.device.clear_faults();
            match end {
                End::Completes => {
                    loops.receive(peer, 1);
                    let message = SendWorkRequest::new(loops.filled(8));
                    loops.peers.post(peer, message, 2).unwrap();
                    loops.device.run();
                    assert_eq!(next(&mut loops.here).token, 7);
                }
                End::Removed => {
                    loops.here.remove(channel).unwrap();
                    let ended = next(&mut loops.here);
                    assert_eq!(ended.token, 7);
                    assert!(ended.result().is_err());
                }
                End::Dropped => {}
                End::Left => {
                    loops.device.fail("modify_qp").errno(libc::EIO).always();
                    loops.device.fail("destroy_qp").errno(libc::EIO).times(1);
                    let Loops { here, peers, pool, domain, device } = loops;
                    drop(here);
                    assert_eq!(pool.available(), pool.chunks() - 1, "the device may still use it");
                    // The device carries the request out late, in memory that is still there.
                    device.clear_faults();
                    device.run();
                    drop((peers, target, pool, domain));
                    assert_eq!(device.live(Kind::QueuePair), 1);
                    assert_eq!(device.violations().0, 0, "{}", device.violations().1);
                    continue;
                }
            }
            drop(target);
            loops.finish();
        }
    }
}

/// The texts of datagram ends are theirs alone.
#[test]
fn a_refused_post_of_a_channel_says_nothing_of_datagrams() {
    let device = FunctionDevice::model();
    let mut loops = Loops::on(device.clone());
    let (channel, _peer) = loops.connect();
    device.fail("post_send").errno(libc::EDESTADDRREQ).times(1);
    let refused = loops.here.post(channel, SendWorkRequest::new(loops.filled(1)), 1).unwrap_err();
    let text = refused.to_string();
    assert!(text.starts_with("ibv_post_send: ") && !text.contains("datagram"), "{text}");
    drop(refused);
    loops.finish();
}
