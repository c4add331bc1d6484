//! Scopes: many operations in flight.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use ibverbs::channel::ScopeError;
use ibverbs::{
    Inline, TransportError, TransportResult, WorkStatus, memory::MemorySliceMut,
    settings::MaxRnrRetries,
};
use ibverbs_function_device::{FunctionDevice, Progress};

use crate::pair::{ModelPair as Pair, outstanding, queue, soon};

#[test]
fn a_buffer_comes_back_within_the_scope() {
    let mut pair = Pair::new();
    let mut regions = (pair.region(4, 1), pair.region(4, 0));
    let (one, two) = (&mut pair.one, &mut pair.two);
    let mut ball = regions.0.slice_mut(..).unwrap();
    let mut glove = regions.1.slice_mut(..).unwrap();
    // Many more operations than the table has slots.
    one.scope(|one| {
        two.scope(|two| {
            for round in 0..100 {
                ball[0] = round;
                let caught = two.post_receive(glove)?;
                (ball, _) = one.post_send(ball)?.wait()?;
                let received;
                (glove, received) = caught.wait()?;
                assert_eq!((received.byte_len(), glove[..].to_vec()), (4, ball[..].to_vec()));
                (ball, glove) = (glove, ball);
            }
            Ok::<_, TransportError>(())
        })
    })
    .unwrap();
    drop(regions);
    pair.finish();
}

/// Pieces whose number is known at run time, as vectors and as slices, blocking and in a scope.
#[test]
#[deny(unused_must_use, reason = "a post in a scope is a statement")]
fn pieces_of_run_time_number_are_one_message() {
    let mut pair = Pair::new();
    let mut regions = (pair.region(12, 3), pair.region(12, 0));
    let whole = |parts: &[MemorySliceMut<'_, u8>]| -> Vec<u8> {
        parts.iter().flat_map(|part| part.to_vec()).collect()
    };
    let (one, two) = (&mut pair.one, &mut pair.two);
    let message = regions.0.to_vec();
    let pieces: Vec<_> = (0..3).map(|i| regions.0.slice(4 * i..4 * i + 4).unwrap()).collect();
    let mut sink: Vec<_> = regions.1.slice_mut(..).unwrap().chunks(6).unwrap().collect();
    two.scope(|two| {
        let receive = two.post_receive(&mut sink[..])?;
        one.send(&pieces)?;
        let (_, received) = receive.wait()?;
        assert_eq!(received.byte_len(), 12);
        Ok::<_, TransportError>(())
    })
    .unwrap();
    assert_eq!(whole(&sink), message);
    // Here the scope gets the buffers by value. The handle of the send is dropped at once, and the
    // vector is freed.
    sink.iter_mut().for_each(|part| part.fill(0));
    one.scope(|one| {
        two.scope(|two| {
            let receive = two.post_receive(sink)?;
            one.post_send(pieces)?;
            let (sink, received) = receive.wait()?;
            assert_eq!((received.byte_len(), sink.len()), (12, 2));
            assert_eq!(whole(&sink), message);
            Ok::<_, TransportError>(())
        })
    })
    .unwrap();
    drop(regions);
    pair.finish();
}

/// A message may have as many pieces as the channel was built for in each direction, and not one more.
#[test]
fn a_message_has_at_most_the_pieces_of_its_channel() {
    let mut pair = Pair::new();
    let mut regions = (pair.region(4, 3), pair.region(4, 0));
    let message = regions.0.to_vec();
    let pieces: Vec<_> = (0..4).map(|i| regions.0.slice(i..i + 1).unwrap()).collect();
    let mut sink: Vec<_> = regions.1.slice_mut(..).unwrap().chunks(1).unwrap().collect();
    let (one, two) = (&mut pair.one, &mut pair.two);
    let refused = |error: TransportError| {
        assert!(error.to_string().contains("pieces is 4, and must be within 0..=3"), "{error}");
    };
    refused(one.send(&pieces).unwrap_err());
    refused(two.receive(&mut sink[..]).unwrap_err());
    two.scope(|two| {
        let receive = two.post_receive(&mut sink[..3])?;
        one.send(&pieces[..3])?;
        assert_eq!(receive.wait()?.1.byte_len(), 3);
        Ok::<_, TransportError>(())
    })
    .unwrap();
    drop(sink);
    assert_eq!(regions.1[..3], message[..3]);
    drop(regions);
    pair.finish();
}

#[test]
fn a_window_goes_round_a_ring_of_buffers() {
    let mut pair = Pair::new();
    let mut regions = (pair.region(64, 0), pair.region(64, 0));
    let (one, two) = (&mut pair.one, &mut pair.two);
    let parts = regions.0.slice_mut(..).unwrap().chunks(16).unwrap();
    let mut source: Vec<_> = parts.map(Some).collect();
    let sink = regions.1.slice_mut(..).unwrap();
    let sum = one
        .scope(|one| {
            two.scope(|two| {
                let mut receives: Vec<_> = sink
                    .chunks(16)?
                    .map(|part| two.post_receive(part).map(Some))
                    .collect::<TransportResult<_>>()?;
                let mut sends: [_; 4] = std::array::from_fn(|_| None);
                let mut sum = 0_u32;
                for message in 0..100_usize {
                    let at = message % 4;
                    if let Some(sending) = sends[at].take() {
                        let (buffer, _) = ibverbs::channel::ScopedPendingWork::wait(sending)?;
                        source[at] = Some(buffer);
                        let (buffer, _) = receives[at].take().unwrap().wait()?;
                        sum += u32::from(buffer[3]);
                        receives[at] = Some(two.post_receive(buffer)?);
                    }
                    let mut buffer = source[at].take().unwrap();
                    buffer.fill(message as u8);
                    sends[at] = Some(one.post_send(buffer)?);
                }
                for at in 0..4 {
                    sends[at].take().unwrap().wait()?;
                    sum += u32::from(receives[at].take().unwrap().wait()?.0[3]);
                }
                Ok::<_, ScopeError<TransportError>>(sum)
            })
        })
        .unwrap();
    assert_eq!(sum, (0..100).sum());
    drop(source);
    drop(regions);
    pair.finish();
}

#[test]
fn completions_out_of_order_find_their_owners() {
    let mut pair = Pair::new();
    let mut regions = (pair.region(8, 10), pair.region(8, 0));
    let (device, completions) = (&pair.device, queue(&pair.two));
    let (one, two) = (&mut pair.one, &mut pair.two);
    let mut parts = regions.1.slice_mut(..).unwrap().chunks(2).unwrap();
    let [a, b, c] = [(); 3].map(|()| parts.next().unwrap());
    drop(parts);
    let echo = regions.0.slice_mut(..).unwrap();
    two.scope(|two| {
        let (a, b, c) = (two.post_receive(a)?, two.post_receive(b)?, two.post_receive(c)?);
        device.hold_completions(completions, 0, true);
        let mut echo = one
            .scope(|one| {
                let mut echo = Some(echo);
                for _ in 0..3 {
                    let sent = one.post_send(echo.take().unwrap().slice(..2)?)?.wait()?.0;
                    echo = Some(sent);
                }
                Ok::<_, TransportError>(echo.unwrap())
            })
            .unwrap();
        let target = two.post_send(Inline(b"x"));
        assert!(target.is_ok());
        // The last one first. One poll finds all; the completions of the others are kept in the table meanwhile.
        for index in [2, 0, 0] {
            device.release(completions, index);
        }
        let (mut a, mut b, mut c) = (a, b, c);
        assert!(b.poll().unwrap().is_ok(), "the completion of c was first");
        assert!(c.poll().unwrap().is_ok() && c.poll().unwrap().is_ok());
        assert!(a.poll().unwrap().is_ok());
        assert!(b.spin_poll().is_ok());
        let (b, c, a) = (b.wait()?.0, c.wait()?.0, a.wait()?.0);
        for part in [a, b, c] {
            assert_eq!(part[..], echo[..]);
        }
        echo[0] = 0;
        device.hold_completions(completions, 0, false);
        device.release_all(completions);
        one.receive(&mut echo)?;
        assert_eq!(echo[0], b'x');
        Ok::<_, TransportError>(())
    })
    .unwrap();
    drop(regions);
    pair.finish();
}

#[test]
fn sends_and_receives_interleave() {
    for seed in 0..20 {
        let device = FunctionDevice::model();
        device.progress(Progress::Manual);
        let mut pair = Pair::with(device, |builder| builder);
        let mut regions = [pair.region(32, 0), pair.region(32, 50), pair.region(64, 0)];
        let [from_one, from_two, to] = &mut regions;
        let (device, completions) = (&pair.device, [queue(&pair.one), queue(&pair.two)]);
        let (at_one, at_two) = to.slice_mut(..).unwrap().split_at(32).unwrap();
        let (one, two) = (&mut pair.one, &mut pair.two);
        one.scope(|one| {
            two.scope(|two| {
                let mut handles = Vec::new();
                let mut sends = Vec::new();
                let parts = at_one.chunks(8)?.zip(at_two.chunks(8)?).zip((0..32).step_by(8));
                for ((at_one, at_two), at) in parts {
                    handles.push(one.post_receive(at_one)?);
                    handles.push(two.post_receive(at_two)?);
                    sends.push(one.post_send(from_one.slice(at..at + 8)?)?);
                    sends.push(two.post_send(from_two.slice(at..at + 8)?)?);
                }
                device.run();
                for queue in completions {
                    device.shuffle(queue, seed);
                }
                for handle in handles.into_iter().rev() {
                    assert_eq!(handle.wait()?.1.byte_len(), 8);
                }
                for send in sends {
                    send.wait()?;
                }
                Ok::<_, TransportError>(())
            })
        })
        .unwrap();
        assert_eq!(to[..32], from_two[..]);
        assert_eq!(to[32..], from_one[..]);
        drop(regions);
        pair.finish();
    }
}

/// Completions that one poll found, in every order of the waits: whichever is the first, in the middle or the last.
#[test]
fn completions_that_were_polled_together_find_their_owners() {
    for order in 0..24 {
        let device = FunctionDevice::model();
        device.progress(Progress::Manual);
        let mut pair = Pair::with(device, |builder| builder);
        let mut region = pair.region(16, 0);
        let device = &pair.device;
        let (one, two) = (&mut pair.one, &mut pair.two);
        two.scope(|two| {
            let parts = region.slice_mut(..)?.chunks(4)?;
            let receives = parts.map(|part| two.post_receive(part));
            let receives = receives.collect::<TransportResult<Vec<_>>>()?;
            let mut receives: Vec<_> = (1..).zip(receives).collect();
            one.scope(|one| {
                let sends = [&[1; 1][..], &[2; 2], &[3; 3], &[4; 4]];
                let sends = sends.map(|bytes| one.post_send(Inline(bytes)));
                device.run();
                sends.into_iter().try_for_each(|send| send?.wait().map(drop))
            })
            .unwrap();
            let polls = device.calls("poll_cq");
            for digit in [order % 4, order / 4 % 3, order / 12, 0] {
                let (len, receive) = receives.remove(digit);
                let (part, received) = receive.wait()?;
                assert_eq!(received.byte_len(), len, "order {order}");
                assert!(part[..len as usize].iter().all(|byte| u32::from(*byte) == len));
            }
            assert_eq!(device.calls("poll_cq"), polls + 1);
            Ok::<_, TransportError>(())
        })
        .unwrap();
        drop(region);
        pair.finish();
    }
}

#[test]
fn what_a_handle_says_it_says_again() {
    let device = FunctionDevice::model();
    device.progress(Progress::Manual);
    let mut pair = Pair::with(device, |builder| builder);
    let target = pair.shared(1);
    let region = pair.region(8, 5);
    let device = &pair.device;
    pair.one
        .scope(|s| {
            let mut write = s.post_write(region.slice(..)?, target.remote())?;
            assert!(write.poll().is_none() && write.poll().is_none());
            device.run();
            assert_eq!(write.poll().unwrap()?.opcode(), write.poll().unwrap()?.opcode());
            assert_eq!(write.spin_poll()?.opcode(), ibverbs::completion::WorkOpcode::Write);
            assert_eq!(write.wait()?.0[..], region[..]);
            Ok::<_, TransportError>(())
        })
        .unwrap();
    drop((target, region));
    pair.finish();
}

#[test]
fn the_queues_are_full_before_the_device_is_asked() {
    let device = FunctionDevice::model();
    device.progress(Progress::Manual);
    let mut pair = Pair::with(device, |builder| builder);
    let target = pair.shared(1);
    let remote = target.remote();
    let (region, mut sink) = (pair.region(8, 5), pair.region(8, 0));
    let device = &pair.device;
    pair.one
        .scope(|s| {
            let slice = region.slice(..)?;
            let mut writes: Vec<_> =
                (0..4).map(|_| s.post_write(slice, remote)).collect::<Result<_, _>>()?;
            assert!(!s.can_post_send() && s.can_post_receive());
            assert_eq!(s.post_write(slice, remote).unwrap_err(), TransportError::QueueFull);
            assert_eq!(s.post_send(Inline(&[])).unwrap_err(), TransportError::QueueFull);
            for part in sink.slice_mut(..)?.chunks(2)? {
                drop(s.post_receive(part)?);
            }
            assert_eq!(s.post_receive(()).unwrap_err(), TransportError::QueueFull);
            assert_eq!((device.calls("post_send"), device.calls("post_recv")), (4, 4));
            device.run();
            // A slot is free again once its result was taken.
            writes.pop().unwrap().wait()?;
            assert!(s.can_post_send());
            writes.push(s.post_write(slice, remote)?);
            assert_eq!(s.post_write(slice, remote).unwrap_err(), TransportError::QueueFull);
            Err::<(), _>(TransportError::QueueFull)
        })
        .unwrap_err();
    assert_eq!(outstanding(&pair.device, &pair.one), (0, 0));
    drop((target, region, sink));
    pair.finish();
}

#[test]
fn a_scope_waits_for_what_was_dropped() {
    let mut pair = Pair::new();
    let target = pair.shared(4);
    let region = pair.region(8, 7);
    pair.one
        .scope(|s| {
            for at in 0..4 {
                // Dropped, forgotten, or polled first.
                let mut write =
                    s.post_write(region.slice(..)?, target.remote().sub_region(at * 8, 8)?)?;
                match at {
                    0 => drop(write),
                    1 => std::mem::forget(write),
                    2 => drop(write.poll()),
                    _ => drop(write.spin_poll()?),
                }
            }
            Ok::<_, TransportError>(())
        })
        .unwrap();
    assert_eq!(outstanding(&pair.device, &pair.one), (0, 0));
    let expected = u64::from_ne_bytes(region[..].try_into().unwrap());
    assert_eq!(target.to_vec(), [expected; 4]);
    pair.exchange();
    drop((target, region));
    pair.finish();
}

fn impatient() -> Pair {
    Pair::with(FunctionDevice::model(), |builder| builder.max_rnr_retries(MaxRnrRetries::NONE))
}

#[test]
fn a_scope_tells_of_failures_that_nobody_has_seen() {
    for end in ["dropped", "forgotten", "seen"] {
        let mut pair = impatient();
        let result = pair.one.scope(|s| {
            let mut send = s.post_send(())?;
            match end {
                "dropped" => drop(send),
                "forgotten" => std::mem::forget(send),
                _ => while send.poll().is_none() {},
            }
            Ok::<_, TransportError>(())
        });
        match result {
            Ok(()) => assert_eq!(end, "seen"),
            Err(ScopeError::Exit(TransportError::Work(error))) if end != "seen" => {
                assert_eq!(error.status(), WorkStatus::RnrRetryExceeded);
            }
            other => panic!("{end}: {other:?}"),
        }
        pair.finish();
    }
}

/// The completion of one operation arrives while the program waits for another, and the program never asks
/// for the first.
#[test]
fn a_failure_that_came_up_for_another_is_told_though_its_handle_is_dropped() {
    let mut pair = impatient();
    let result = pair.one.scope(|s| {
        let (failing, flushed) = (s.post_send(())?, s.post_send(())?);
        flushed.wait().unwrap_err();
        drop(failing);
        Ok::<_, TransportError>(())
    });
    let Err(ScopeError::Exit(TransportError::Work(error))) = result else { panic!("{result:?}") };
    assert_eq!(error.status(), WorkStatus::RnrRetryExceeded);
    pair.finish();
}

#[test]
fn the_closure_s_error_comes_first() {
    let mut pair = impatient();
    let error = pair
        .one
        .scope(|s| {
            let failing = s.post_send(()).unwrap();
            failing.wait().unwrap_err();
            Err::<(), _>("mine")
        })
        .unwrap_err();
    assert_eq!(error, ScopeError::Closure("mine"));
    pair.finish();
}

#[test]
fn an_error_in_the_closure_settles_what_is_in_flight() {
    let mut pair = Pair::new();
    let mut region = pair.region(8, 0);
    let error = pair.one.scope(|s| {
        std::mem::forget(s.post_receive(region.slice_mut(..).unwrap()).unwrap());
        Err::<(), _>("enough")
    });
    assert_eq!(error, Err(ScopeError::Closure("enough")));
    assert_eq!(outstanding(&pair.device, &pair.one), (0, 0));
    assert_eq!(pair.one.send(()).unwrap_err(), TransportError::Stopped);
    let mut pair = pair.reconnect();
    pair.exchange();
    drop(region);
    pair.finish();
}

#[test]
fn an_error_with_nothing_in_flight_leaves_the_channel_connected() {
    let mut pair = Pair::new();
    let target = pair.shared(1);
    let result = pair.one.scope(|s| {
        s.post_write(Inline(&[1; 8]), target.remote()).unwrap().wait().unwrap();
        Err::<(), _>(())
    });
    assert_eq!(result, Err(ScopeError::Closure(())));
    pair.exchange();
    drop(target);
    pair.finish();
}

#[test]
fn a_loop_may_be_left() {
    let mut pair = Pair::new();
    let mut region = pair.region(8, 0);
    let target = pair.shared(1);
    pair.one
        .scope(|s| {
            for part in region.slice_mut(..)?.chunks(2)? {
                let write = s.post_write(part, target.remote())?;
                if !s.can_post_send() {
                    break;
                }
                drop(write);
            }
            Ok::<_, TransportError>(())
        })
        .unwrap();
    assert_eq!(outstanding(&pair.device, &pair.one), (0, 0));
    region.fill(1);
    pair.exchange();
    drop((region, target));
    pair.finish();
}

#[test]
fn a_panic_goes_on_when_all_is_settled() {
    let mut pair = Pair::new();
    let mut region = pair.region(8, 0);
    let panic = catch_unwind(AssertUnwindSafe(|| {
        pair.one.scope(|s| {
            let _receive = s.post_receive(region.slice_mut(..)?)?;
            std::mem::forget(s.post_receive(())?);
            if s.can_post_receive() {
                std::panic::panic_any(17_u8);
            }
            Ok::<_, TransportError>(())
        })
    }))
    .unwrap_err();
    assert_eq!(panic.downcast_ref(), Some(&17_u8));
    assert_eq!(outstanding(&pair.device, &pair.one), (0, 0));
    assert_eq!(pair.one.send(()).unwrap_err(), TransportError::Stopped);
    let mut pair = pair.reconnect();
    pair.exchange();
    drop(region);
    pair.finish();
}

#[test]
fn a_manual_scope_returns_what_its_closure_does() {
    let mut pair = Pair::new();
    let target = pair.shared(1);
    let remote = target.remote();
    let value = pair.one.manual_scope(|s| {
        s.post_write(Inline(&[1; 8]), remote)?.wait()?;
        let mut polled = s.post_write(Inline(&[2; 8]), remote)?;
        polled.spin_poll()?;
        Ok::<_, TransportError>(5)
    });
    assert_eq!(value, Ok(5));
    pair.exchange();
    let error = pair.one.manual_scope(|s| {
        std::mem::forget(s.post_receive(()).unwrap());
        Err::<(), _>("mine")
    });
    assert_eq!(error, Err("mine"));
    assert_eq!(outstanding(&pair.device, &pair.one), (0, 0));
    drop(target);
    pair.finish();
}

#[test]
fn a_manual_scope_panics_about_unpolled_work() {
    for forget in [0, 1, 2] {
        let mut pair = Pair::new();
        let mut region = pair.region(8, 0);
        let panic = catch_unwind(AssertUnwindSafe(|| {
            pair.one.manual_scope(|s| {
                let receive = s.post_receive(region.slice_mut(..)?)?;
                match forget {
                    0 => drop(receive),
                    1 => std::mem::forget(receive),
                    // Executed, but its result is never asked for.
                    _ => {
                        std::mem::forget(receive);
                        std::mem::forget(
                            s.post_write((), ibverbs::RemoteMemoryRegion::new(0, 0, 0)?)?,
                        );
                    }
                }
                Ok::<_, TransportError>(())
            })
        }))
        .unwrap_err();
        let words = panic.downcast_ref::<&str>().unwrap();
        assert!(words.contains("operations that it did not poll"), "{words}");
        assert_eq!(outstanding(&pair.device, &pair.one), (0, 0));
        drop(region);
        pair.finish();
    }
}

#[test]
fn a_handle_s_deadline_stops_the_channel() {
    let mut pair = Pair::new();
    let mut region = pair.region(8, 0);
    let result = pair.one.scope(|s| {
        let (first, second) = region.slice_mut(..)?.split_at(4)?;
        let mut other = s.post_receive(second)?;
        let late = s.post_receive(first)?.wait_until(soon()).unwrap_err();
        assert_eq!(late, TransportError::TimedOut);
        let flushed = other.poll().unwrap().unwrap_err().work_error().unwrap();
        assert_eq!(flushed.status(), WorkStatus::Flushed);
        assert_eq!(s.post_send(()).unwrap_err(), TransportError::Stopped);
        let mut third = s.post_receive(()).map(drop);
        assert_eq!(third.as_mut().unwrap_err(), &mut TransportError::Stopped);
        Ok::<_, TransportError>(())
    });
    assert_eq!(result, Ok(()));
    assert_eq!(outstanding(&pair.device, &pair.one), (0, 0));
    let mut pair = pair.reconnect();
    let late = pair.one.scope(|s| s.post_receive(())?.wait_until(soon()).map(drop));
    assert_eq!(late.unwrap_err(), ScopeError::Closure(TransportError::TimedOut));
    drop(region);
    pair.finish();
}

#[test]
fn a_scope_s_deadline_is_for_what_is_left() {
    let mut pair = Pair::new();
    let mut region = pair.region(8, 0);
    let target = pair.shared(1);
    let later = Instant::now() + Duration::from_secs(60);
    let done = pair.one.scope_until(later, |s| {
        drop(s.post_write(Inline(&[1; 8]), target.remote())?);
        Ok::<_, TransportError>(1)
    });
    assert_eq!(done, Ok(1));
    let result = pair.one.scope_until(soon(), |s| {
        std::mem::forget(s.post_receive(region.slice_mut(..)?)?);
        Ok::<_, TransportError>(())
    });
    assert_eq!(result, Err(ScopeError::Exit(TransportError::TimedOut)));
    assert!(Instant::now() < later, "nothing waited for the first deadline");
    assert_eq!(outstanding(&pair.device, &pair.one), (0, 0));
    drop((region, target));
    pair.reconnect().finish();
}
