//! Channels: buffers that are lent to the device, and how they come back.

use std::mem::forget;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use ibverbs::memory::BorrowedMemoryRegion;
use ibverbs::{Inline, ReceiveWorkRequest, SendWorkRequest, TransportError, TransportResult};

use crate::device;
use crate::rig::{Pair, both};

#[test]
fn a_blocking_send_reads_memory_that_the_program_can_see() {
    both(|| {
        let mut pair = Pair::new();
        let (source, mut sink) = (pair.region(8, 1), pair.region(8, 0));
        let (one, two) = (&mut pair.one, &mut pair.two);
        two.scope(|two| {
            let receive = two.post_receive(sink.slice_mut(..)?)?;
            let slice = source.slice(..)?;
            let seen = &source[2..4]; // lent to nobody while the device reads it
            one.send(&slice).unwrap();
            assert_eq!(seen, [3, 4]);
            let (received, success) = receive.wait()?;
            assert_eq!((success.byte_len(), received[..].to_vec()), (8, source[..].to_vec()));
            Ok::<_, TransportError>(())
        })
        .unwrap();
        assert_eq!(sink[..], source[..]);
    });
}

#[test]
fn the_device_writes_one_half_while_the_program_writes_the_other() {
    both(|| {
        let mut pair = Pair::new();
        let (source, mut sink) = (pair.region(4, 1), pair.region(8, 0));
        let (one, two) = (&mut pair.one, &mut pair.two);
        two.scope(|two| {
            let (left, mut right) = sink.slice_mut(..)?.split_at(4)?;
            let receive = two.post_receive(left)?;
            right[0] = 7;
            one.send(&source.slice(..)?).unwrap();
            right[1] = 8;
            let (left, _) = receive.wait()?;
            assert_eq!((left[..].to_vec(), right[..2].to_vec()), (vec![1, 2, 3, 4], vec![7, 8]));
            Ok::<_, TransportError>(())
        })
        .unwrap();
        assert_eq!(sink[..6], [1, 2, 3, 4, 7, 8]);
    });
}

#[test]
fn buffers_go_round_within_a_scope() {
    both(|| {
        let mut pair = Pair::new();
        let mut regions = (pair.region(4, 1), pair.region(4, 0));
        let (one, two) = (&mut pair.one, &mut pair.two);
        let mut ball = regions.0.slice_mut(..).unwrap();
        let mut glove = regions.1.slice_mut(..).unwrap();
        one.scope(|one| {
            two.scope(|two| {
                for round in 0..10 {
                    ball[0] = round;
                    let caught = two.post_receive(glove)?;
                    (ball, _) = one.post_send(ball)?.wait()?;
                    (glove, _) = caught.wait()?;
                    assert_eq!(glove[..], ball[..]);
                    (ball, glove) = (glove, ball);
                }
                Ok::<_, TransportError>(())
            })
        })
        .unwrap();
    });
}

#[test]
fn a_window_of_several_pieces() {
    both(|| {
        let mut pair = Pair::new();
        let mut regions = (pair.region(12, 0), pair.region(12, 100));
        let (one, two) = (&mut pair.one, &mut pair.two);
        one.scope(|one| {
            two.scope(|two| {
                let mut from = regions.0.slice_mut(..)?.chunks(4)?;
                let mut to = regions.1.slice_mut(..)?.chunks(6)?;
                let receives = [(); 2].map(|()| two.post_receive(to.next().unwrap()));
                let [a, b, last] = [(); 3].map(|()| from.next().unwrap());
                let first = one.post_send([a.slice(..2)?, b])?;
                let second = one.post_send(last)?;
                first.wait()?;
                second.wait()?;
                for receive in receives {
                    receive?.wait()?;
                }
                Ok::<_, TransportError>(())
            })
        })
        .unwrap();
        assert_eq!(regions.1[..], [0, 1, 4, 5, 6, 7, 8, 9, 10, 11, 110, 111]);
    });
}

#[test]
fn inline_bytes_come_from_anywhere() {
    both(|| {
        let mut pair = Pair::new();
        let mut sink = pair.region(4, 0);
        let (one, two) = (&mut pair.one, &mut pair.two);
        two.scope(|two| {
            let receive = two.post_receive(sink.slice_mut(..)?)?;
            one.send(Inline(&[9, 8, 7, 6])).unwrap();
            receive.wait()
        })
        .map(drop)
        .unwrap();
        assert_eq!(sink[..], [9, 8, 7, 6]);
    });
}

#[test]
fn what_a_scope_leaves_in_flight_comes_back_when_it_ends() {
    both(|| {
        let mut pair = Pair::new();
        let mut sink = pair.region(8, 0);
        let outcome = pair.two.scope(|two| {
            let (left, right) = sink.slice_mut(..)?.split_at(4)?;
            let receive = two.post_receive(left)?;
            drop(two.post_receive(right)?);
            drop(receive);
            Err::<(), _>(TransportError::TimedOut)
        });
        outcome.unwrap_err();
        sink.fill(3); // nothing is in flight any more
        assert_eq!(sink[..], [3; 8]);
    });
}

#[test]
fn a_panic_in_a_scope_gives_everything_back() {
    both(|| {
        let mut pair = Pair::new();
        let mut sink = pair.region(8, 0);
        let two = &mut pair.two;
        let panic = catch_unwind(AssertUnwindSafe(|| {
            two.scope(|two| -> TransportResult<()> {
                let _receive = two.post_receive(sink.slice_mut(..).unwrap())?;
                panic!("of the closure");
            })
        }));
        assert!(panic.is_err());
        sink.fill(4);
    });
}

#[test]
fn a_deadline_stops_the_channel_and_reset_revives_it() {
    both(|| {
        let mut pair = Pair::new();
        let (source, mut sink) = (pair.region(4, 1), pair.region(4, 0));
        let error = pair.two.until(Instant::now()).receive(&mut sink.slice_mut(..).unwrap());
        assert!(matches!(error, Err(TransportError::TimedOut)), "{error:?}");
        sink.fill(0);
        let (one, two) = (pair.one.reset().unwrap(), pair.two.reset().unwrap());
        let (to_one, to_two) = (one.endpoint(), two.endpoint());
        pair.one = one.handshake(to_two).unwrap();
        pair.two = two.handshake(to_one).unwrap();
        let one = &mut pair.one;
        let (received, _) = pair
            .two
            .scope(|two| {
                let receive = two.post_receive(sink.slice_mut(..)?)?;
                one.send(&source.slice(..)?).unwrap();
                receive.wait()
            })
            .unwrap();
        assert_eq!(received[..], [1, 2, 3, 4]);
    });
}

#[test]
fn a_failing_poll_gives_nothing_back_early() {
    both(|| {
        let mut pair = Pair::new();
        let mut sink = pair.region(4, 0);
        let error = pair.two.scope(|two| {
            let receive = two.post_receive(sink.slice_mut(..)?)?;
            device::fail_polls(1);
            receive.wait()
        });
        assert!(error.is_err());
        sink.fill(1);
    });
}

#[test]
fn work_that_is_not_polled_is_taken_back() {
    both(|| {
        let mut pair = Pair::new();
        let (source, mut sink) = (pair.region(4, 1), pair.region(4, 0));
        let (one, two) = (&mut pair.one, &mut pair.two);
        // SAFETY: the work is waited for, and the buffers are left alone until then.
        unsafe {
            let receive = two
                .post_unpolled(ReceiveWorkRequest::new(&mut sink.slice_mut(..).unwrap()))
                .unwrap();
            let send = one.post_unpolled(SendWorkRequest::new(&source.slice(..).unwrap())).unwrap();
            send.wait(one).map(drop).unwrap();
            receive.wait(two).map(drop).unwrap();
        }
        assert_eq!(sink[..], source[..]);
    });
}

/// While an unpolled operation has one part of a region, the program may use the others by slices.
#[test]
fn other_parts_of_a_region_are_used_beside_unpolled_work() {
    both(|| {
        let mut pair = Pair::new();
        let source = pair.region(4, 1);
        let mut sink = pair.region(12, 0);
        let mut memory = [0_u8; 12];
        let mut borrowed = BorrowedMemoryRegion::new(&pair.domain, &mut memory).unwrap();
        let (one, two) = (&mut pair.one, &mut pair.two);
        macro_rules! receive_into {
            ($region:ident) => {
                // SAFETY: the part is left alone until the work was waited for; the others are used by
                // slices that do not contain it.
                let receive = unsafe {
                    two.post_unpolled(ReceiveWorkRequest::new(&mut $region.slice_mut(4..8).unwrap())).unwrap()
                };
                $region.slice_mut(..4).unwrap().fill(7);
                one.send(&source.slice(..).unwrap()).map(drop).unwrap();
                $region.slice_mut(8..).unwrap().fill(8);
                assert_eq!($region.slice(..4).unwrap()[..], [7; 4]);
                receive.wait(two).map(drop).unwrap();
                assert_eq!($region[..], [7, 7, 7, 7, 1, 2, 3, 4, 8, 8, 8, 8]);
            };
        }
        receive_into!(sink);
        receive_into!(borrowed);
    });
}

/// Leaks on purpose: to be run without the leak check.
#[test]
fn forgotten_handles_and_channels_leak_and_dangle_nowhere() {
    both(|| {
        let mut pair = Pair::new();
        let mut sink = pair.region(8, 0);
        let outcome = pair.two.scope(|two| {
            let (left, right) = sink.slice_mut(..)?.split_at(4)?;
            forget(two.post_receive(left)?);
            forget(two.post_receive(right)?);
            Err::<(), _>(TransportError::TimedOut)
        });
        outcome.unwrap_err();
        sink.fill(5);
        let Pair { one, two, domain } = pair;
        forget(two);
        drop(sink);
        drop(one);
        forget(domain);
    });
}
