//! Sends of a loop without completions of their own.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use ibverbs::channel::{AnyBuffer, OwnedBuffer};
use ibverbs::memory::{GatherBuffer, ScatterBuffer};
use ibverbs::{
    ChannelId, Loop, OperationError, PooledBuffer, ReceiveWorkRequest, RemoteMemoryRegion,
    SendWorkRequest, TransportError, WorkStatus, WriteWorkRequest,
};
use ibverbs_function_device::{FunctionDevice, Progress};

use crate::loop_unsignaled_orders::within_minutes;
use crate::loops::{Loops, next};
use crate::pair::TestDevice;
use crate::software::Software;

fn rig<D: TestDevice>(device: D) -> (Loops<D>, ChannelId, ChannelId) {
    let mut loops = Loops::on(device);
    let (channel, peer) = loops.connect();
    (loops, channel, peer)
}

fn manual() -> FunctionDevice {
    let device = FunctionDevice::make();
    device.progress(Progress::Manual);
    device
}

fn post<D: TestDevice>(
    loops: &mut Loops<D>,
    at: ChannelId,
    token: u64,
) -> Result<(), OperationError<PooledBuffer>> {
    let buffer = loops.filled(token as u8);
    loops.here.post_unsignaled(at, SendWorkRequest::new(buffer), token)
}

/// Every fourth has a completion.
#[test]
fn what_has_no_completion_comes_back_with_the_next_one() {
    let (mut loops, channel, peer) = rig(manual());
    for round in 0..3 {
        for token in 0..4 {
            loops.receive(peer, token);
        }
        for token in 0..3 {
            post(&mut loops, channel, token).unwrap();
        }
        loops.device.run();
        assert!(loops.here.next_ended().unwrap().is_none(), "{round}: none has a completion");
        assert_eq!(loops.here.in_flight(channel), 3);
        loops.send(channel, 3, 3);
        loops.device.run();
        for token in 0..4 {
            let ended = next(&mut loops.here);
            assert_eq!((ended.channel, ended.token), (channel, token));
            assert_eq!(ended.buffer[0], token as u8);
            ended.result().unwrap();
            assert_eq!(next(&mut loops.peers).buffer[0], token as u8);
        }
        assert_eq!(loops.here.in_flight(channel), 0);
    }
    loops.finish();
}

#[test]
fn the_last_place_is_for_one_with_a_completion() {
    let (mut loops, channel, peer) = rig(manual());
    for _ in 0..3 {
        for token in 0..4 {
            loops.receive(peer, token);
            post(&mut loops, channel, token).unwrap();
        }
        let full = post(&mut loops, channel, 4).unwrap_err();
        assert_eq!(full.error, TransportError::QueueFull);
        assert!(full.buffer.is_some());
        drop(full);
        loops.device.run();
        for token in 0..4 {
            let ended = next(&mut loops.here);
            assert_eq!(ended.token, token);
            ended.result().unwrap();
            drop(next(&mut loops.peers));
        }
    }
    loops.finish();
}

#[test]
fn a_loop_does_not_wait_for_what_has_no_completion() {
    let (mut loops, channel, peer) = rig(Software::make());
    loops.receive(peer, 1);
    post(&mut loops, channel, 1).unwrap();
    let Err(TransportError::Verbs(error)) = loops.here.wait_ended() else { panic!("it ends") };
    assert_eq!(error.raw_os_error(), Some(libc::EDEADLK));
    loops.receive(peer, 2);
    loops.send(channel, 2, 2);
    for token in [1, 2] {
        assert_eq!(loops.here.wait_ended().unwrap().token, token);
        drop(next(&mut loops.peers));
    }
    loops.finish();
}

/// Some were carried out, some not.
#[test]
fn all_come_back_when_the_channel_ends() {
    type End = fn(&mut Loops<FunctionDevice>, ChannelId);
    let ends: [(&str, End); 2] = [
        ("stop", |loops, at| assert_eq!(loops.here.stop(at), Ok(3))),
        ("remove", |loops, at| loops.here.remove(at).unwrap()),
    ];
    for (name, end) in ends {
        for carried_out in [0, 1, 3] {
            let device = manual();
            let mut loops = Loops::on(device);
            let prepare = |loops: &Loops<FunctionDevice>| {
                loops.prepare(&loops.here).settle_timeout(Duration::from_secs(600))
            };
            let (one, two) = crate::pair::connect(prepare(&loops), loops.prepare(&loops.peers));
            let channel = loops.here.add(one).unwrap();
            let peer = loops.peers.add(two).unwrap();
            for token in 0..3 {
                loops.receive(peer, token);
            }
            for token in 0..3 {
                if token == carried_out {
                    loops.device.run();
                }
                post(&mut loops, channel, token).unwrap();
            }
            if carried_out == 3 {
                loops.device.run();
            }
            end(&mut loops, channel);
            for token in 0..3 {
                let ended = next(&mut loops.here);
                assert_eq!((ended.channel, ended.token), (channel, token), "{name}");
                assert!(ended.result().is_err(), "{name}: nobody knows");
            }
            let refused = post(&mut loops, channel, 4).unwrap_err();
            assert!(refused.buffer.is_some(), "{name}");
            drop(refused);
            loops.finish();
        }
    }
}

#[test]
fn a_dropped_loop_drops_their_buffers() {
    let (mut loops, channel, _) = rig(manual());
    post(&mut loops, channel, 1).unwrap();
    post(&mut loops, channel, 2).unwrap();
    loops.finish();
}

#[test]
fn what_fails_has_a_completion_and_what_was_before_it_has_succeeded() {
    let (mut loops, channel, peer) = rig(Software::manual());
    loops.receive(peer, 0);
    post(&mut loops, channel, 0).unwrap();
    let nowhere = RemoteMemoryRegion::new(0x1000, 64, 1).unwrap();
    let mut buffer = loops.filled(1);
    buffer.set_len(8).unwrap();
    loops.here.post_unsignaled(channel, WriteWorkRequest::new(buffer, nowhere), 1).unwrap();
    post(&mut loops, channel, 2).unwrap();
    loops.device.run();
    let statuses: Vec<_> = (0..3)
        .map(|token| {
            let ended = next(&mut loops.here);
            assert_eq!(ended.token, token);
            match ended.result() {
                Ok(_) => WorkStatus::Success,
                Err(TransportError::Work(error)) => error.status(),
                Err(error) => panic!("{error}"),
            }
        })
        .collect();
    assert_eq!(statuses[0], WorkStatus::Success);
    assert!(![WorkStatus::Success, WorkStatus::Flushed].contains(&statuses[1]), "{statuses:?}");
    assert_eq!(statuses[2], WorkStatus::Flushed);
    loops.finish();
}

/// The peer's queue pair is gone, so nothing is acknowledged.
#[test]
fn all_come_back_from_a_peer_that_is_dead() {
    let (mut loops, channel, peer) = rig(Software::make());
    loops.peers.remove(peer).unwrap();
    for token in 0..3 {
        post(&mut loops, channel, token).unwrap();
    }
    for token in 0..3 {
        let ended = next(&mut loops.here);
        assert_eq!(ended.token, token);
        assert!(ended.result().is_err());
    }
    loops.finish();
}

#[test]
fn a_refused_post_changes_nothing() {
    let (mut loops, channel, peer) = rig(manual());
    for token in 0..3 {
        loops.receive(peer, token);
    }
    for (token, unsignaled) in [(0, true), (1, true), (2, false)] {
        loops.device.fail("post_send").errno(libc::EIO).times(1);
        for refused in [true, false] {
            let posted = match unsignaled {
                true => post(&mut loops, channel, token),
                false => {
                    let message = SendWorkRequest::new(loops.filled(2));
                    loops.here.post(channel, message, token)
                }
            };
            assert_eq!(posted.is_err(), refused, "{token}");
            assert!(posted.err().is_none_or(|refused| refused.buffer.is_some()));
        }
    }
    loops.device.run();
    for token in 0..3 {
        let ended = next(&mut loops.here);
        assert_eq!(ended.token, token);
        ended.result().unwrap();
        drop(next(&mut loops.peers));
    }
    loops.finish();
}

/// Sends behind them are accepted, and end with errors.
#[test]
fn a_queue_has_room_again_after_a_failure_behind_them() {
    within_minutes(|| {
        for breaks in [true, false] {
            let mut loops = Loops::on(manual());
            let (one, two) =
                crate::pair::connect(loops.prepare(&loops.here), loops.prepare(&loops.peers));
            let (number, peer) = (one.number(), loops.peers.add(two).unwrap());
            let channel = loops.here.add(one).unwrap();
            let receive = ReceiveWorkRequest::new(loops.filled(0));
            loops.here.post(channel, receive, 9).unwrap();
            for token in 0..2 {
                loops.receive(peer, token);
            }
            post(&mut loops, channel, 0).unwrap();
            if breaks {
                post(&mut loops, channel, 1).unwrap();
                loops.device.run();
                loops.device.break_qp(number);
            } else {
                loops.device.fail("ring_doorbell").errno(libc::EACCES).times(1);
                assert!(post(&mut loops, channel, 1).unwrap_err().buffer.is_none());
            }
            let mut tokens: Vec<_> = (0..3).map(|_| next(&mut loops.here).token).collect();
            tokens.sort_unstable();
            assert_eq!(tokens, [0, 1, 9]);
            assert!(loops.here.next_ended().unwrap().is_none());
            assert_eq!((loops.here.in_flight(channel), loops.out()), (0, 2));
            for token in 2..6 {
                loops.send(channel, 1, token);
            }
            for token in 2..6 {
                let ended = next(&mut loops.here);
                assert_eq!(ended.token, token);
                assert!(ended.result().is_err());
            }
            loops.finish();
        }
    });
}

#[test]
fn a_channel_that_is_taken_out_and_stopped_returns_them() {
    for stops in [true, false] {
        let (mut loops, channel, peer) = rig(manual());
        loops.receive(peer, 0);
        post(&mut loops, channel, 0).unwrap();
        loops.device.run();
        let detached = loops.here.take_out(channel).unwrap();
        if stops {
            detached.stop().unwrap();
        }
        loops.device.run();
        let ended = next(&mut loops.here);
        assert_eq!((ended.token, ended.result().is_ok()), (0, !stops));
        drop(ended);
        assert!(loops.here.next_ended().unwrap().is_none());
        assert_eq!(loops.here.in_flight(channel), 0);
        if stops {
            loops.here.end_destroyed(detached.destroy()).unwrap();
        } else {
            loops.here.put_back(detached).unwrap();
            loops.receive(peer, 1);
            loops.send(channel, 1, 1);
            loops.device.run();
            assert_eq!(next(&mut loops.here).token, 1);
        }
        loops.finish();
    }
}

#[test]
fn a_sign_of_life_returns_them() {
    let (mut loops, channel, peer) = rig(manual());
    for token in 0..4 {
        loops.receive(peer, token);
    }
    for round in 0..3 {
        post(&mut loops, channel, round).unwrap();
        for _ in 0..2 {
            loops.here.keep_alive(channel).unwrap();
            assert_eq!(loops.here.in_flight(channel), 2, "one write is enough");
        }
        loops.device.run();
        assert_eq!(next(&mut loops.here).token, round);
        assert!(loops.here.next_ended().unwrap().is_none());
        assert_eq!(loops.here.in_flight(channel), 0);
    }
    loops.finish();
}

/// A buffer whose memory the program does not name.
#[derive(Debug)]
struct Unnamed;

// SAFETY: it names no memory.
unsafe impl GatherBuffer for Unnamed {
    type List = [ibverbs::ffi::ibv_sge; 1];
    type Kept = Self;

    fn gather(&self) -> ibverbs::Result<Self::List> {
        panic!("the buffer")
    }
}

// SAFETY: as above.
unsafe impl ScatterBuffer for Unnamed {
    fn scatter(&mut self) -> ibverbs::Result<Self::List> {
        self.gather()
    }
}

// SAFETY: as above.
unsafe impl OwnedBuffer for Unnamed {}

#[test]
fn a_panic_of_a_buffer_takes_no_completion_from_other_sends() {
    let loops = Loops::on(manual());
    let mut here = Loop::<AnyBuffer>::new(loops.domain.context_parent(), 64).unwrap();
    let mut add = || {
        let (one, two) = crate::pair::connect(loops.prepare(&here), loops.prepare(&here));
        here.add(two).unwrap();
        here.add(one).unwrap()
    };
    let (channel, other) = (add(), add());
    let nothing = || WriteWorkRequest::new((), RemoteMemoryRegion::new(0, 0, 0).unwrap());
    let panics = |here: &mut Loop<'static, AnyBuffer>, unsignaled: bool| {
        let request = SendWorkRequest::new(Unnamed);
        let posted = catch_unwind(AssertUnwindSafe(|| match unsignaled {
            true => here.post_unsignaled(channel, request, 9),
            false => here.post(channel, request, 9),
        }));
        assert!(posted.is_err());
    };
    panics(&mut here, true);
    here.post(other, nothing(), 0).unwrap();
    here.post_unsignaled(channel, nothing(), 1).unwrap();
    panics(&mut here, true);
    panics(&mut here, false);
    here.post(channel, nothing(), 2).unwrap();
    loops.device.run();
    let mut tokens: Vec<_> = (0..3).map(|_| next(&mut here).token).collect();
    tokens.sort_unstable();
    assert_eq!(tokens, [0, 1, 2]);
    assert!(here.next_ended().unwrap().is_none());
    assert_eq!((here.in_flight(channel), here.in_flight(other)), (0, 0));
    drop(here);
    loops.finish();
}
