//! Channels on Soft-RoCE, between its two devices. To be run by `script/test rxe`, in the machine
//! that `script/vm` starts.

#[path = "support/vm/mod.rs"]
mod vm;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use ibverbs::{
    ChannelClosed, QueuePairType, ScopeError, SharedCompletionQueue, SharedMemoryRegion,
    TransportError, WorkErrorClass, WorkOpcode, WorkStatus,
};

use vm::channels::{ALL, Side, connect, deadline, exchange, handshake, nothing_is_left, sides};
use vm::{PATIENCE, one_at_a_time};

#[test]
fn messages_go_both_ways() {
    let _lock = one_at_a_time();
    let sides = sides();
    let (mut one, mut two) = connect(sides.0.builder(), sides.1.builder());
    exchange(&sides, &mut one, &mut two);
    let mut region = sides.1.region(8);
    thread::scope(|threads| {
        threads.spawn(|| {
            one.send_with_immediate(&(), 0xcafe).unwrap();
            one.send_inline(b"inline!!").unwrap();
        });
        let told = two.receive_deadline(&mut (), deadline()).unwrap();
        assert_eq!((told.immediate(), told.byte_len()), (Some(0xcafe), 0));
        let (low, high) = region.slice_mut(..2).unwrap().split_at(1).unwrap();
        two.receive_deadline(&mut (low, high), deadline()).unwrap();
    });
    assert_eq!(&region[0].to_ne_bytes(), b"inline!!");
    drop(region);
    assert_eq!(one.close().unwrap(), ChannelClosed::Drained);
    drop(two);
    nothing_is_left(sides);
}

#[test]
fn a_window_of_messages_flies_in_one_scope() {
    const WINDOW: usize = 8;
    const MESSAGES: u64 = 400;
    let _lock = one_at_a_time();
    let sides = sides();
    let (mut one, mut two) = connect(sides.0.builder(), sides.1.builder());
    let (mut source, mut sink) = (sides.0.region(WINDOW * 256), sides.1.region(WINDOW * 256));
    thread::scope(|threads| {
        threads.spawn(|| {
            let mut idle: Vec<_> = source.slice_mut(..).unwrap().chunks(256).unwrap().collect();
            one.manual_scope(|s| {
                let mut flying = std::collections::VecDeque::new();
                for message in 0..MESSAGES {
                    let mut buffer = match idle.pop() {
                        Some(buffer) => buffer,
                        None => {
                            let oldest: ibverbs::ScopedPendingWork<'_, _> =
                                flying.pop_front().unwrap();
                            oldest.wait_deadline(deadline())?.0
                        }
                    };
                    buffer.fill(message);
                    flying.push_back(s.post_send(buffer)?);
                }
                flying.into_iter().try_for_each(|work| work.wait().map(drop))
            })
            .unwrap();
        });
        let parts = sink.slice_mut(..).unwrap().chunks(256).unwrap();
        two.scope(|s| {
            let mut ring = Vec::new();
            for part in parts {
                ring.push(Some(s.post_receive(part)?));
            }
            for message in 0..MESSAGES {
                let slot = &mut ring[message as usize % WINDOW];
                let (part, completion) = slot.take().unwrap().wait_deadline(deadline())?;
                assert_eq!(completion.byte_len(), 2048);
                assert!(part.iter().all(|&number| number == message), "message {message}");
                if message + (WINDOW as u64) < MESSAGES {
                    *slot = Some(s.post_receive(part)?);
                }
            }
            Ok::<_, TransportError>(())
        })
        .unwrap();
    });
    drop((one, two, source, sink));
    nothing_is_left(sides);
}

#[test]
fn memory_is_worked_on_from_afar() {
    let _lock = one_at_a_time();
    let sides = sides();
    let (mut one, two) = connect(sides.0.builder(), sides.1.builder());
    let target = SharedMemoryRegion::<u64>::new(&sides.1.domain, 1024, ALL).unwrap();
    let remote = target.remote();
    let mut local = sides.0.region(1024);
    for (index, number) in local.iter_mut().enumerate() {
        *number = 3 * index as u64;
    }
    one.write_deadline(&local.slice(..).unwrap(), remote, deadline()).unwrap();
    assert!(target.to_vec().iter().copied().eq((0..1024).map(|n| 3 * n)));
    one.write_inline(&7_u64.to_ne_bytes(), remote.sub_region(80, 8).unwrap()).unwrap();
    local.fill(0);
    one.read_deadline(&mut local.slice_mut(..).unwrap(), remote, deadline()).unwrap();
    assert_eq!((local[9], local[10], local[1023]), (27, 7, 3069));
    let word = remote.sub_region(80, 8).unwrap();
    one.scope(|s| {
        let (a, rest) = local.slice_mut(..3)?.split_at(1)?;
        let (b, c) = rest.split_at(1)?;
        let add = s.post_fetch_add(a, word, 5)?;
        let swap = s.post_compare_swap(b, word, 12, 100)?;
        let fail = s.post_compare_swap(c, word, 12, 200)?;
        assert_eq!(add.wait_deadline(deadline())?.1.opcode(), WorkOpcode::FetchAdd);
        assert_eq!(swap.wait()?.0[0], 12);
        assert_eq!(fail.wait()?.0[0], 100);
        Ok::<_, TransportError>(())
    })
    .unwrap();
    assert_eq!((local[0], target.read_one(10).unwrap()), (7, 100));
    // The rkey does not allow this: the peer's device reports it, and the channel has to be reset.
    let outside = ibverbs::RemoteMemoryRegion::new(remote.address() + 8192, 8, remote.rkey());
    let error = one.write_inline(&[0; 8], outside.unwrap()).unwrap_err();
    assert_eq!(error.work_error().unwrap().status(), WorkStatus::RemoteAccess);
    let error = one.write_inline(&[0; 8], remote).unwrap_err();
    assert_eq!(error.work_error().unwrap().class(), WorkErrorClass::Flushed);
    let (one, two) = (one.reset().unwrap(), two.reset().unwrap());
    let (mut one, mut two) = handshake(one, two);
    exchange(&sides, &mut one, &mut two);
    drop((one, two, target, local));
    nothing_is_left(sides);
}

#[test]
fn what_never_arrives_ends_in_time() {
    let _lock = one_at_a_time();
    let sides = sides();
    let (mut one, mut two) = connect(sides.0.builder(), sides.1.builder());
    let mut region = sides.0.region(64);
    for round in 0..5 {
        exchange(&sides, &mut one, &mut two);
        let start = Instant::now();
        let soon = start + Duration::from_millis(100);
        let late = match round % 3 {
            0 => one.receive_deadline(&mut region.slice_mut(..).unwrap(), soon).unwrap_err(),
            1 => one
                .scope_deadline(soon, |s| {
                    for part in region.slice_mut(..)?.chunks(8)? {
                        std::mem::forget(s.post_receive(part)?);
                    }
                    Ok::<_, TransportError>(())
                })
                .unwrap_err()
                .into(),
            // It waits for a receive while it has other work outstanding.
            _ => one.send_deadline(&region.slice(..).unwrap(), soon).unwrap_err(),
        };
        assert_eq!(late, TransportError::TimedOut);
        assert!(start.elapsed() >= Duration::from_millis(100));
        assert!(start.elapsed() < PATIENCE, "{:?}", start.elapsed());
        region.fill(round);
        assert_eq!(one.receive(&mut ()).unwrap_err(), TransportError::Stopped);
        let (again_one, again_two) = (one.reset().unwrap(), two.reset().unwrap());
        (one, two) = handshake(again_one, again_two);
    }
    exchange(&sides, &mut one, &mut two);
    drop((one, two, region));
    nothing_is_left(sides);
}

#[test]
fn errors_and_panics_flush_what_is_in_flight() {
    let _lock = one_at_a_time();
    let sides = sides();
    let (mut one, mut two) = connect(sides.0.builder(), sides.1.builder());
    let mut region = sides.0.region(64);
    let error = one.scope(|s| {
        let mut first = None;
        for part in region.slice_mut(..).unwrap().chunks(8).unwrap() {
            first = first.or(Some(s.post_receive(part).unwrap()));
        }
        assert!(first.unwrap().poll().is_none());
        Err::<(), _>("enough")
    });
    assert_eq!(error, Err(ScopeError::Closure("enough")));
    let (again_one, again_two) = (one.reset().unwrap(), two.reset().unwrap());
    (one, two) = handshake(again_one, again_two);
    let panic = catch_unwind(AssertUnwindSafe(|| {
        one.manual_scope(|s| {
            let _receive = s.post_receive(region.slice_mut(..)?)?;
            std::panic::panic_any("oh");
            #[expect(unreachable_code, reason = "it gives the closure its type")]
            Ok::<(), TransportError>(())
        })
    }));
    assert_eq!(panic.unwrap_err().downcast_ref(), Some(&"oh"));
    region.fill(1);
    let (again_one, again_two) = (one.reset().unwrap(), two.reset().unwrap());
    (one, two) = handshake(again_one, again_two);
    exchange(&sides, &mut one, &mut two);
    // SAFETY: the region outlives the channel, which ends the receive.
    let _work = unsafe { one.receive_unpolled(&mut region.slice_mut(..).unwrap()) }.unwrap();
    assert_eq!(one.close().unwrap(), ChannelClosed::Flushed(1));
    drop((two, region));
    nothing_is_left(sides);
}

#[test]
fn a_channel_sleeps_until_something_arrives() {
    let _lock = one_at_a_time();
    let sides = sides();
    let sleepy = |side: &Side| side.builder().sleep_after(10);
    let (mut one, mut two) = connect(sleepy(&sides.0), sleepy(&sides.1));
    exchange(&sides, &mut one, &mut two);
    let before = cpu_time();
    thread::scope(|threads| {
        threads.spawn(|| {
            thread::sleep(Duration::from_millis(500));
            one.send_with_immediate(&(), 3).unwrap();
        });
        let told = two.receive_deadline(&mut (), deadline()).unwrap();
        assert_eq!(told.immediate(), Some(3));
    });
    let spent = cpu_time() - before;
    assert!(spent < Duration::from_millis(250), "it slept, but for {spent:?}");
    let soon = Instant::now() + Duration::from_millis(50);
    assert_eq!(two.receive_deadline(&mut (), soon).unwrap_err(), TransportError::TimedOut);
    drop((one, two));
    nothing_is_left(sides);
}

/// The processor time of this process so far.
fn cpu_time() -> Duration {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let fields: Vec<_> = stat.rsplit_once(") ").unwrap().1.split(' ').collect();
    let ticks: u64 = fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap();
    Duration::from_millis(ticks * 10)
}

#[test]
fn channels_share_a_completion_queue() {
    let _lock = one_at_a_time();
    let sides = sides();
    let queue = Arc::new(SharedCompletionQueue::new(&sides.0.context, 128).unwrap());
    let mut near = Vec::new();
    let mut far = Vec::new();
    for _ in 0..3 {
        let sharing = sides.0.builder().shared_completion_queue(&queue);
        let (one, two) = connect(sharing, sides.1.builder());
        near.push(one);
        far.push(two);
    }
    thread::scope(|threads| {
        for (index, mut channel) in (0_u32..).zip(near.drain(..)) {
            threads.spawn(move || {
                for n in 0..50 {
                    channel.send_with_immediate(&(), 1000 * index + n).unwrap();
                    let told = channel.receive_deadline(&mut (), deadline()).unwrap();
                    assert_eq!(told.immediate(), Some(1000 * index + n));
                }
            });
        }
        for mut channel in far.drain(..) {
            threads.spawn(move || {
                for _ in 0..50 {
                    let told = channel.receive_deadline(&mut (), deadline()).unwrap();
                    channel.send_with_immediate(&(), told.immediate().unwrap()).unwrap();
                }
            });
        }
    });
    assert_eq!(queue.available(), queue.capacity());
    drop(queue);
    nothing_is_left(sides);
}

#[test]
fn an_unreliable_connection_carries_messages_too() {
    let _lock = one_at_a_time();
    let sides = sides();
    let unreliable =
        |side: &Side| side.builder().queue_pair_type(QueuePairType::UnreliableConnected);
    let (mut one, mut two) = connect(unreliable(&sides.0), unreliable(&sides.1));
    let mut region = sides.1.region(4);
    // The receive is posted before the message comes, which nobody would send again.
    let received = two.scope(|s| {
        let receive = s.post_receive(region.slice_mut(..)?)?;
        one.send_inline(&[9; 32]).unwrap();
        receive.wait_deadline(deadline()).map(|(part, _)| part[3])
    });
    assert_eq!(received.unwrap(), u64::from_ne_bytes([9; 8]));
    drop((one, two, region));
    nothing_is_left(sides);
}
