//! Windows: one doorbell, one completion, and every order of failure.

use std::time::Instant;

use ibverbs::channel::{PreparedWindow, ScopeError, WindowError, WindowRequests};
use ibverbs::{
    ChannelBuilder, Inline, ReadWorkRequest, RemoteMemoryRegion, SendWorkRequest, TransportError,
    WorkErrorClass, WorkStatus, WriteWorkRequest, ffi,
};
use ibverbs_function_device::{FunctionDevice, Progress};

use crate::pair::{ModelPair, Pair, PairOn, TestDevice, break_queue_pair, queue, soon};
use crate::software::Software;

/// Memory that the peer does not have.
fn nowhere() -> RemoteMemoryRegion {
    RemoteMemoryRegion::new(4096, 8, 0x7fff_ff00).unwrap()
}

fn ended(error: ScopeError<TransportError>) -> TransportError {
    match error {
        ScopeError::Closure(error) | ScopeError::Exit(error) => error,
    }
}

fn prepared<W: WindowRequests>(requests: W) -> PreparedWindow<W::Buffers> {
    PreparedWindow::new(requests).map_err(|error| error.error).unwrap()
}

fn manual() -> FunctionDevice {
    let device = FunctionDevice::model();
    device.progress(Progress::Manual);
    device
}

/// Writes, whose last byte says where they go.
fn writes_arrive<D: TestDevice>(mut pair: PairOn<D>) {
    let target = pair.shared(4);
    let region = pair.region(32, 1);
    let at = |index: u64| target.remote().sub_region(8 * index, 8).unwrap();
    let parts: Vec<_> =
        (0..4).map(|index| region.slice(8 * index..8 * index + 8).unwrap()).collect();
    let word = [9; 8];
    pair.one
        .scope(|s| {
            for round in 0..50 {
                target.fill(0);
                // All sizes, so that windows begin at each place of the queue.
                let count = 1 + round % 4;
                let requests: Vec<_> = parts[..count]
                    .iter()
                    .zip(0..)
                    .map(|(part, index)| WriteWorkRequest::new(*part, at(index)))
                    .collect();
                let (back, _) = s.post_window(prepared(requests))?.wait_until(soon_enough())?;
                let back = back.into_buffers();
                assert_eq!(back.len(), count);
                for (index, part) in back.iter().enumerate() {
                    let word = u64::from_ne_bytes(part[..].try_into().unwrap());
                    assert_eq!(target.to_vec()[index], word, "{round}");
                }
                assert!(target.to_vec()[count..].iter().all(|word| *word == 0));
                // A single one in between.
                s.post_write(parts[0], at(0))?.wait()?;
            }
            // Requests of several types, some of whose bytes are local.
            let write = WriteWorkRequest::new(Inline(&word), at(3));
            let read = ReadWorkRequest::new((), at(0));
            let window = (write, read, WriteWorkRequest::new(parts[2], at(1)));
            let (Inline(_), (), part) = s.post_window(prepared(window))?.wait()?.0.into_buffers();
            assert_eq!(target.to_vec()[3], u64::from_ne_bytes(word));
            assert_eq!(target.to_vec()[1], u64::from_ne_bytes(part[..].try_into().unwrap()));
            Ok::<_, TransportError>(())
        })
        .unwrap();
    drop(parts);
    drop((target, region));
    pair.exchange();
    pair.finish();
}

fn soon_enough() -> Instant {
    Instant::now() + std::time::Duration::from_secs(60)
}

#[test]
fn a_window_arrives_and_gives_its_buffers_back() {
    writes_arrive(Pair::new());
    writes_arrive(ModelPair::new());
}

#[test]
fn one_post_and_one_completion() {
    let mut pair = ModelPair::with(manual(), |builder| builder);
    let target = pair.shared(4);
    let device = &pair.device;
    let before = device.calls("post_send");
    pair.one
        .scope(|s| {
            let at = |index: u64| target.remote().sub_region(8 * index, 8).unwrap();
            let requests = [0, 1, 2].map(|index| WriteWorkRequest::new(Inline(&[7; 8]), at(index)));
            let window = s.post_window(prepared(requests))?;
            assert_eq!(device.calls("post_send") - before, 1);
            let signalled = |back| {
                device.posted(back).unwrap().send.send_flags
                    & ibverbs::ffi::ibv_send_flags::IBV_SEND_SIGNALED.0
            };
            assert_eq!([2, 1, 0].map(|back| signalled(back) != 0), [false, false, true]);
            let mut numbers = [2, 1, 0].map(|back| device.posted(back).unwrap().wr_id).to_vec();
            numbers.dedup();
            assert_eq!(numbers.len(), 3);
            device.run();
            window.wait()?;
            Ok::<_, TransportError>(())
        })
        .unwrap();
    assert_eq!(
        target.to_vec(),
        [0x0707_0707_0707_0707, 0x0707_0707_0707_0707, 0x0707_0707_0707_0707, 0]
    );
    drop(target);
    pair.finish();
}

#[test]
fn without_room_for_all_nothing_is_posted() {
    let mut pair = ModelPair::with(manual(), |builder| builder);
    let region = pair.region(8, 1);
    let part = region.slice(..).unwrap();
    let target = pair.shared(1);
    let remote = target.remote();
    let device = pair.device.clone();
    let number = pair.one.number();
    pair.one
        .scope(|s| {
            let single = s.post_write(part, remote)?;
            let window = [(); 4].map(|()| WriteWorkRequest::new(part, remote));
            let WindowError { error, request, buffers } =
                s.post_window(prepared(window)).unwrap_err();
            assert_eq!((error, request), (TransportError::QueueFull, None));
            assert_eq!(buffers.unwrap().into_buffers().map(|part| part.len()), [8; 4]);
            assert_eq!(device.outstanding(number), (1, 0));
            // The queue has room for three requests.
            let [a, b, c, _] = window;
            let window = s.post_window(prepared([a, b, c]))?;
            assert!(!s.can_post_send());
            assert_eq!(device.outstanding(number), (4, 0));
            device.run();
            single.wait()?;
            window.wait()?;
            Ok::<_, TransportError>(())
        })
        .unwrap();
    // None, and more than a window can have.
    let errors = {
        let none: [WriteWorkRequest<()>; 0] = [];
        let none = PreparedWindow::new(none).unwrap_err();
        let many = vec![WriteWorkRequest::new((), remote); 32_768];
        let many = PreparedWindow::new(many).unwrap_err();
        assert_eq!(many.buffers.map(|buffers| buffers.len()), Some(32_768));
        [none.error, many.error]
    };
    for error in errors {
        assert!(error.to_string().contains("and must be within 1..=32767"), "{error}");
    }
    // A request that is wrong by itself.
    let short = remote.sub_region(0, 4).unwrap();
    let mut window = [remote, short, remote].map(|to| WriteWorkRequest::new(part, to));
    let error = PreparedWindow::new(window).unwrap_err();
    assert_eq!((error.request, error.buffers.is_some()), (Some(1), true));
    assert!(error.to_string().starts_with("request 2 of the window, counted from 1:"), "{error}");
    // The window refuses it as a replacement too, and stays as it was.
    let wrong = window[1];
    window[1] = window[0];
    let mut window = prepared(window);
    assert_eq!(window.set(1, wrong).unwrap_err().buffer.map(|part| part.len()), Some(8));
    let window =
        pair.one.scope(|s| s.post_window(window).map(|window| (device.run(), window.wait())));
    window.unwrap().1.unwrap();
    assert_eq!(device.outstanding(number), (0, 0));
    drop((region, target));
    pair.device.progress(Progress::OnPost);
    pair.exchange();
    pair.finish();
}

/// Places that lie apart make a window, too.
#[test]
fn places_need_not_be_neighbours() {
    let mut pair = ModelPair::new();
    let target = pair.shared(1);
    let remote = target.remote();
    let (device, completions) = (pair.device.clone(), queue(&pair.one));
    pair.one
        .scope(|s| {
            let write = || WriteWorkRequest::new(Inline(&[1; 8]), remote);
            device.hold_completions(completions, 0, true);
            let singles = [(); 4].map(|()| s.post(write()).unwrap());
            let [a, b, c, d] = singles;
            device.run();
            // The second one stays.
            for index in [0, 1, 1] {
                device.release(completions, index);
            }
            for single in [a, c, d] {
                single.wait()?;
            }
            assert_eq!(
                s.post_window(prepared([write(); 4])).map(drop).unwrap_err().error,
                TransportError::QueueFull
            );
            let window = s.post_window(prepared([write(); 3]))?;
            assert!(!s.can_post_send());
            device.hold_completions(completions, 0, false);
            device.release_all(completions);
            b.wait()?;
            // Only the place of `b` is free.
            s.post(write())?.wait()?;
            window.wait()?;
            s.post_window(prepared([write(); 4]))?.wait()?;
            Ok::<_, TransportError>(())
        })
        .unwrap();
    drop(target);
    pair.exchange();
    pair.finish();
}

/// The provider refuses the first, the second or the last request of three.
#[test]
fn a_refused_request_is_named_and_all_buffers_come_back() {
    for (refused, reads, silent) in
        (0..3).flat_map(|n| [(n, false, false), (n, true, false), (n, false, n > 0)])
    {
        let mut pair = ModelPair::with(manual(), |builder| builder);
        let (target, mut region) = (pair.shared(1), pair.region(24, 1));
        let remote = target.remote();
        let (device, number) = (pair.device.clone(), pair.one.number());
        let result = pair.one.scope(|s| {
            // `other` succeeds if nothing of the window was posted, and is stopped with the window otherwise.
            let other = s.post_write((), remote)?;
            device.fail("post_send").errno(libc::EINVAL).skip(refused).times(1);
            if silent {
                device.fail("lose_error").times(1);
            }
            let (request, parts) = if reads {
                let parts: Vec<_> = region.slice_mut(..)?.chunks(8)?.collect();
                let reads = parts.into_iter().map(|part| ReadWorkRequest::new(part, remote));
                let error =
                    s.post_window(prepared(reads.collect::<Vec<_>>())).map(drop).unwrap_err();
                (error.request, error.buffers.map(|window| window.buffers().len()))
            } else {
                let part = region.slice(..8)?;
                let error =
                    s.post_window(prepared([SendWorkRequest::new(part); 3])).map(drop).unwrap_err();
                (error.request, error.buffers.map(|window| window.buffers().len()))
            };
            assert_eq!((request, parts), (Some(refused as usize), Some(3)));
            if refused == 0 {
                assert_eq!(device.outstanding(number), (1, 0));
                device.run();
                other.wait()?;
            } else {
                assert_eq!(device.outstanding(number), (0, 0), "{refused}");
                assert_eq!(s.post_send(()).unwrap_err(), TransportError::Stopped);
                let error = other.wait().unwrap_err();
                assert!(error.is_consequence(), "{error}");
            }
            Ok::<_, TransportError>(())
        });
        result.unwrap();
        drop((target, region));
        pair.device.progress(Progress::OnPost);
        if refused > 0 {
            pair = pair.reconnect();
        }
        pair.exchange();
        pair.finish();
    }
}

/// A request is refused and the queue pair cannot be reset: only destroying it keeps the device from writing.
#[test]
fn a_refused_request_whose_queue_pair_cannot_be_reset() {
    for reads in [false, true] {
        let mut pair = ModelPair::with(manual(), |builder| builder);
        let (target, mut region) = (pair.shared(1), pair.region(16, 1));
        let remote = target.remote();
        pair.device.fail("post_send").errno(libc::EINVAL).skip(1).times(1);
        pair.device.fail("modify_to_err").errno(libc::EIO).always();
        pair.device.fail("modify_to_reset").errno(libc::EIO).always();
        let result = pair.one.scope(|s| {
            if reads {
                let parts: Vec<_> = region.slice_mut(..)?.chunks(8)?.collect();
                let reads = parts.into_iter().map(|part| ReadWorkRequest::new(part, remote));
                s.post_window(prepared(reads.collect::<Vec<_>>())).map(drop)?;
            } else {
                s.post_window(prepared([SendWorkRequest::new(Inline(b"x")); 2])).map(drop)?;
            }
            Ok::<_, TransportError>(())
        });
        let error = ended(result.unwrap_err());
        assert!(matches!(error, TransportError::Verbs(_)), "{error}");
        let expected = if reads { TransportError::Closed } else { TransportError::Stopped };
        assert_eq!(pair.one.send(()).unwrap_err(), expected);
        pair.device.clear_faults();
        drop((target, region));
        pair.finish();
    }
}

/// The provider queues all requests but fails to tell the kernel, as rxe and siw may.
#[test]
fn a_window_that_may_be_posted_is_taken_back() {
    for reads in [false, true] {
        let mut pair = ModelPair::with(manual(), |builder| builder);
        let (target, mut region) = (pair.shared(1), pair.region(16, 1));
        let remote = target.remote();
        let (device, number) = (pair.device.clone(), pair.one.number());
        device.fail("ring_doorbell").errno(libc::EACCES).times(1);
        let result = pair.one.scope(|s| {
            let buffers = if reads {
                let parts: Vec<_> = region.slice_mut(..)?.chunks(8)?.collect();
                let reads = parts.into_iter().map(|part| ReadWorkRequest::new(part, remote));
                let error =
                    s.post_window(prepared(reads.collect::<Vec<_>>())).map(drop).unwrap_err();
                assert_eq!(error.request, None);
                error.buffers.map(|window| window.buffers().len())
            } else {
                let window = [SendWorkRequest::new(region.slice(..8)?); 2];
                s.post_window(prepared(window))
                    .map(drop)
                    .unwrap_err()
                    .buffers
                    .map(|window| window.buffers().len())
            };
            assert_eq!((buffers, device.outstanding(number)), (Some(2), (0, 0)));
            Ok::<_, TransportError>(())
        });
        result.unwrap();
        assert_eq!(pair.one.send(()).unwrap_err(), TransportError::Stopped);
        drop((target, region));
        pair.device.progress(Progress::OnPost);
        pair = pair.reconnect();
        pair.exchange();
        pair.finish();
    }
}

/// Each request fails in turn, most of which have no completion if they succeed.
fn failures_are_named<D: TestDevice>(device: impl Fn() -> D) {
    for failing in 0..4 {
        let mut pair = PairOn::with(device(), |builder: ChannelBuilder<'static>| builder);
        let (target, region) = (pair.shared(4), pair.region(8, 1));
        let part = region.slice(..).unwrap();
        let result = pair.one.scope(|s| {
            let to = |index: u64| match index {
                _ if index == failing => nowhere(),
                _ => target.remote().sub_region(8 * index, 8).unwrap(),
            };
            let window = [0, 1, 2, 3].map(|index| WriteWorkRequest::new(part, to(index)));
            let WindowError { error, request, buffers } =
                s.post_window(prepared(window))?.wait_until(soon_enough()).map(drop).unwrap_err();
            assert_eq!(request, Some(failing as usize), "{error}");
            assert_eq!(error.work_error().unwrap().status(), WorkStatus::RemoteAccess, "{error}");
            assert_eq!(buffers.unwrap().into_buffers().map(|part| part[0]), [1; 4]);
            // The next one is flushed.
            let next = s.post_window(prepared([WriteWorkRequest::new(part, target.remote()); 2]));
            let next = next.and_then(|window| window.wait().map(drop)).unwrap_err();
            assert!(next.error.is_consequence(), "{next}");
            assert!(next.buffers.is_some());
            Ok::<_, TransportError>(())
        });
        result.unwrap();
        let arrived = target.to_vec().iter().filter(|word| **word != 0).count();
        assert_eq!(arrived, failing as usize);
        drop((target, region));
        pair = pair.reconnect();
        pair.exchange();
        pair.finish();
    }
}

#[test]
fn the_request_that_failed_is_named() {
    failures_are_named(FunctionDevice::model);
    failures_are_named(Software::new);
}

/// Each of the four is the first that is flushed.
#[test]
fn a_flushed_window_ends_with_its_last_request() {
    for done in 0..4 {
        let mut pair = ModelPair::with(manual(), |builder| builder);
        let (target, region) = (pair.shared(1), pair.region(8, 1));
        let window = [WriteWorkRequest::new(region.slice(..).unwrap(), target.remote()); 4];
        let (device, raw, completions) = (pair.device.clone(), pair.one.as_raw(), queue(&pair.one));
        let result = pair.one.scope(|s| {
            let window = s.post_window(prepared(window))?;
            assert_eq!(device.step(done), done);
            device.hold_completions(completions, 0, true);
            break_raw(raw);
            assert_eq!(device.held(completions), 4 - done);
            // All but that of the last request.
            for _ in done..3 {
                device.release(completions, 0);
            }
            let late = s.post_write((), target.remote());
            assert!(late.is_err(), "its places are taken");
            device.hold_completions(completions, 0, false);
            device.release_all(completions);
            let error = window.wait().map(drop).unwrap_err();
            assert_eq!((error.request, error.buffers.is_some()), (Some(done as usize), true));
            assert_eq!(error.error.work_error().unwrap().class(), WorkErrorClass::Flushed);
            Ok::<_, TransportError>(())
        });
        result.unwrap();
        drop((target, region));
        pair.finish();
    }
}

fn break_raw(queue_pair: *mut ffi::ibv_qp) {
    let mut error =
        ffi::ibv_qp_attr { qp_state: ffi::ibv_qp_state::IBV_QPS_ERR, ..Default::default() };
    let mask = ffi::ibv_qp_attr_mask::IBV_QP_STATE.0 as i32;
    // SAFETY: the queue pair is live; what was posted is flushed.
    assert_eq!(unsafe { ffi::ibv_modify_qp(queue_pair, &mut error, mask) }, 0);
}

#[test]
fn a_window_without_a_handle_is_left_to_the_scope() {
    let mut pair = ModelPair::new();
    let (target, region) = (pair.shared(1), pair.region(8, 1));
    let part = region.slice(..).unwrap();
    let write = WriteWorkRequest::new(part, target.remote());
    pair.one
        .scope(|s| {
            for round in 0..20 {
                // The places come back.
                drop(s.post_window(prepared([write; 3]))?);
                std::mem::forget(s.post_window(prepared([write; 1]))?);
                s.wait_all()?;
                if round == 0 {
                    // A forgotten handle keeps its place until the scope has ended.
                    break;
                }
            }
            Ok::<_, TransportError>(())
        })
        .unwrap();
    pair.one
        .scope(|s| {
            for _ in 0..20 {
                drop(s.post_window(prepared([write; 4]))?);
                s.wait_all()?;
            }
            // Its completion was polled before the handle was dropped.
            let window = s.post_window(prepared([write; 2]))?;
            s.post(write)?.wait()?;
            drop(window);
            s.wait_all()?;
            s.post_window(prepared([write; 4]))?.wait()?;
            Ok::<_, TransportError>(())
        })
        .unwrap();
    // Failures are reported by the end of the scope: before and after the handle is dropped.
    for dropped_first in [true, false] {
        for forgotten in [false, true] {
            let result = pair.one.scope(|s| {
                let window = s.post_window(prepared([
                    write,
                    WriteWorkRequest::new(part, nowhere()),
                    write,
                ]))?;
                if !dropped_first {
                    let _ = s.post(write).and_then(|write| write.wait());
                }
                if forgotten {
                    std::mem::forget(window);
                } else {
                    drop(window);
                }
                Ok::<_, TransportError>(())
            });
            let error = result.unwrap_err();
            let ScopeError::Exit(error) = error else { panic!("{error}") };
            assert_eq!(error.work_error().unwrap().status(), WorkStatus::RemoteAccess);
            pair = pair.reconnect();
        }
    }
    drop((target, region));
    pair.exchange();
    pair.finish();
}

#[test]
fn a_deadline_stops_the_channel_and_gives_the_buffers_back() {
    let mut pair = ModelPair::with(manual(), |builder| builder);
    let (target, mut region) = (pair.shared(1), pair.region(16, 1));
    let (device, number) = (pair.device.clone(), pair.one.number());
    let result = pair.one.scope(|s| {
        let (a, b) = region.slice_mut(..)?.split_at(8)?;
        let window = [a, b].map(|part| ReadWorkRequest::new(part, target.remote()));
        let window = s.post_window(prepared(window))?;
        let error = window.wait_until(soon()).map(drop).unwrap_err();
        assert_eq!((error.error, error.request), (TransportError::TimedOut, None));
        assert_eq!(device.outstanding(number), (0, 0));
        let [mut a, mut b] = error.buffers.unwrap().into_buffers();
        a.fill(7);
        b.fill(8);
        Ok::<_, TransportError>(())
    });
    result.unwrap();
    assert_eq!((region[0], region[15]), (7, 8));
    drop((target, region));
    pair.finish();
}

/// A completion that no request of the window has ends nothing.
#[test]
fn made_up_completions_end_nothing() {
    let mut pair = ModelPair::with(manual(), |builder| builder);
    let (target, region) = (pair.shared(1), pair.region(8, 1));
    let write = WriteWorkRequest::new(region.slice(..).unwrap(), target.remote());
    let (device, completions, number) = (pair.device.clone(), queue(&pair.one), pair.one.number());
    pair.one
        .scope(|s| {
            // An earlier window, with the same places.
            let window = s.post_window(prepared([write; 3]))?;
            let earlier = device.posted(1).unwrap().wr_id;
            device.run();
            window.wait()?;
            let window = s.post_window(prepared([write; 3]))?;
            let member = device.posted(1).unwrap().wr_id;
            let mut other = s.post(write)?;
            let made_up = |wr_id, qp_num, status| {
                let completion = ffi::ibv_wc { wr_id, qp_num, status, ..Default::default() };
                device.inject(completions, &completion);
            };
            // Completions of an earlier window, of a position behind the last, of no window and of another
            // queue pair are unknown.
            for (wr_id, of) in [
                (earlier, number),
                (member | 0x7fff, number),
                (member ^ 1 << 55, number),
                (member, number + 1),
            ] {
                made_up(wr_id, of, ffi::ibv_wc_status::IBV_WC_WR_FLUSH_ERR);
                let found = other.poll();
                let unknown = TransportError::UnknownCompletion { queue_pair: of, wr_id };
                assert_eq!(found.unwrap().unwrap_err(), unknown);
            }
            // The success of a request that is not the last one says nothing.
            made_up(member, number, ffi::ibv_wc_status::IBV_WC_SUCCESS);
            assert!(other.poll().is_none());
            device.run();
            window.wait()?;
            other.wait()?;
            // A failure counts, though the device then says that the last one has succeeded.
            let window = s.post_window(prepared([write; 3]))?;
            let member = device.posted(1).unwrap().wr_id;
            let mut other = s.post(write)?;
            made_up(member, number, ffi::ibv_wc_status::IBV_WC_WR_FLUSH_ERR);
            assert!(other.poll().is_none());
            device.run();
            let error = window.wait().map(drop).unwrap_err();
            assert_eq!((error.request, error.buffers.is_some()), (Some(1), true));
            other.wait()?;
            s.post_window(prepared([write; 4])).map(|window| (device.run(), window.wait()))?.1?;
            Ok::<_, TransportError>(())
        })
        .unwrap();
    drop((target, region));
    pair.finish();
}

#[test]
fn a_window_of_messages_needs_as_many_credits() {
    let mut pair = Pair::with(Software::new(), |builder| builder.flow_control(true));
    let region = pair.region(8, 1);
    let part = region.slice(..).unwrap();
    let mut sink = pair.region(24, 0);
    let (one, two) = (&mut pair.one, &mut pair.two);
    two.scope(|two| {
        let mut parts = sink.slice_mut(..)?.chunks(8)?;
        let first =
            [two.post_receive(parts.next().unwrap())?, two.post_receive(parts.next().unwrap())?];
        one.scope(|one| {
            one.wait_for_credit_until(soon_enough())?;
            while one.credits() != Some(2) {
                let _ = one.wait_all();
            }
            let window = [SendWorkRequest::new(part); 3];
            let WindowError { error, buffers, .. } =
                one.post_window(prepared(window)).map(drop).unwrap_err();
            assert_eq!((error, buffers.is_some()), (TransportError::NoCredit, true));
            // Nothing was posted: the credits are still there.
            assert_eq!(one.credits(), Some(2));
            let third = two.post_receive(parts.next().unwrap())?;
            let window = loop {
                match one.post_window(prepared(window)) {
                    Ok(window) => break window,
                    Err(error) => assert_eq!(error.error, TransportError::NoCredit),
                }
            };
            window.wait()?;
            assert_eq!(one.credits(), Some(0));
            for receive in first.into_iter().chain([third]) {
                receive.wait()?;
            }
            Ok::<_, TransportError>(())
        })
        .map_err(ended)?;
        Ok::<_, TransportError>(())
    })
    .unwrap();
    drop((region, sink));
    pair.finish();
}

#[test]
fn a_broken_queue_pair_refuses_or_flushes_a_window() {
    let mut pair = Pair::new();
    break_queue_pair(&pair.one);
    let result = pair.one.scope(|s| {
        let window = [SendWorkRequest::new(Inline(b"x")); 2];
        let error =
            s.post_window(prepared(window)).and_then(|window| window.wait().map(drop)).unwrap_err();
        assert_eq!(error.request, Some(0));
        Ok::<_, TransportError>(())
    });
    result.unwrap();
    pair.finish();
}

/// A list whose length is known at run time alone can be longer than any request of a window.
#[test]
fn a_request_with_too_many_pieces_is_refused_before_it_is_written() {
    let pair = Pair::new();
    let region = pair.region(100, 1);
    let all = region.slice(..).unwrap();
    let pieces =
        |count: usize| -> Vec<_> { (0..count).map(|at| all.slice(at..at + 1).unwrap()).collect() };
    for count in [34, 64, 100] {
        let requests = [1, 1, count].map(|count| SendWorkRequest::new(pieces(count)));
        let refused = PreparedWindow::new(requests).unwrap_err();
        assert_eq!(refused.request, Some(2));
        assert!(
            refused.to_string().contains(&format!("the number of pieces is {count}")),
            "{refused}"
        );
        let [one, other, long] = refused.buffers.unwrap();
        assert_eq!((one.len(), other.len(), long.len()), (1, 1, count));
    }
    // A replacement with too many pieces is refused, too.
    let mut window = prepared([SendWorkRequest::new(pieces(1)), SendWorkRequest::new(pieces(2))]);
    let refused = window.set(0, SendWorkRequest::new(pieces(100))).unwrap_err();
    assert_eq!(refused.buffer.unwrap().len(), 100);
    assert_eq!(window.buffers()[0].len(), 1);
    drop(window);
    drop(region);
    pair.finish();
}
