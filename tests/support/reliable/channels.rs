//! Channels, on any device with reliable connections. `crate::transport` connects them: by a handshake, or by the
//! connection manager.
//!
//! These tests post each receive before the peer sends, since on iWARP a message that finds no receive ends
//! the connection. They do without immediate data and atomics, which iWARP does not have.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use ibverbs::channel::{ChannelClosed, ScopeError, ScopedPendingWork};
use ibverbs::memory::{BorrowedBuffer, GatherBuffer, ScatterBuffer};
use ibverbs::{
    AccessFlags, Channel, ChannelBuilder, Inline, ReceiveWorkRequest, SharedMemoryRegion,
    TransportError, completion::WorkErrorClass,
};

use crate::transport::{self, Link, close, nothing_is_left};
use crate::vm::channels::{Side, deadline};
use crate::vm::{PATIENCE, alone};

/// The access of peers to the memory of these tests.
const ACCESS: AccessFlags =
    AccessFlags::LOCAL_WRITE.union(AccessFlags::REMOTE_READ).union(AccessFlags::REMOTE_WRITE);

type Ends = (Link<Channel<'static>>, Link<Channel<'static>>);

fn sides() -> (Side, Side) {
    let [one, two] = transport::DEVICES.map(Side::new);
    (one, two)
}

fn builder(side: &Side) -> ChannelBuilder<'static> {
    side.builder().access(ACCESS)
}

fn connect(one: ChannelBuilder<'static>, two: ChannelBuilder<'static>) -> Ends {
    transport::channels(one.build().unwrap(), two.build().unwrap())
}

fn reconnect((one, two): Ends) -> Ends {
    transport::channels(transport::reset(one), transport::reset(two))
}

/// Sends a message. Returns its length, and the buffer that it is in.
fn pass<T: ScatterBuffer<Kept = T> + BorrowedBuffer>(
    from: &mut Channel<'_>,
    message: &impl GatherBuffer,
    to: &mut Channel<'_>,
    room: T,
) -> (u32, T) {
    to.scope(|scope| {
        let receive = scope.post_receive(room)?;
        from.until(deadline()).send(message)?;
        let (room, told) = receive.wait_until(deadline())?;
        Ok::<_, TransportError>((told.byte_len(), room))
    })
    .unwrap()
}

/// Sends one message each way.
fn exchange(sides: &(Side, Side), (one, two): &mut Ends) {
    let (mut near, mut far) = (sides.0.region(100), sides.1.region(100));
    for (index, number) in near.iter_mut().enumerate() {
        *number = index as u64;
    }
    let (length, _) = pass(one, &near.slice(..).unwrap(), two, far.slice_mut(..).unwrap());
    assert_eq!(length, 800);
    near.fill(0);
    let (length, _) = pass(two, &far.slice(..50).unwrap(), one, near.slice_mut(..).unwrap());
    assert_eq!(length, 400);
    assert!(near.iter().copied().eq((0..50).chain([0; 50])));
    assert!(far.iter().copied().eq(0..100));
}

#[test]
fn messages_of_all_forms_arrive_whole() {
    const LONG: usize = 40_000;
    let _alone = alone("forms", 240);
    let sides = sides();
    let mut ends = connect(builder(&sides.0), builder(&sides.1));
    exchange(&sides, &mut ends);
    let (one, two) = (&mut ends.0, &mut ends.1);
    let (mut near, mut far) = (sides.0.region(LONG), sides.1.region(LONG));
    for (index, number) in near.iter_mut().enumerate() {
        *number = 7 * index as u64;
    }
    // The message is longer than one segment of any transport.
    let (length, _) = pass(one, &near.slice(..).unwrap(), two, far.slice_mut(..).unwrap());
    assert_eq!((length as usize, &far[..]), (8 * LONG, &near[..]));
    // Messages may be empty, go from pieces into pieces, or be bytes of the program itself.
    assert_eq!(pass(one, &(), two, far.slice_mut(..1).unwrap()).0, 0);
    let pieces = [near.slice(1..2).unwrap(), near.slice(5..8).unwrap(), near.slice(3..4).unwrap()];
    let (low, high) = far.slice_mut(..6).unwrap().split_at(2).unwrap();
    assert_eq!(pass(one, &pieces, two, (low, high)).0, 40);
    assert_eq!(far[..6], [7, 35, 42, 49, 21, 35]);
    two.scope(|scope| {
        let receive = scope.post_receive(far.slice_mut(..4)?)?;
        one.until(deadline()).send(Inline(b"inline!!"))?;
        assert_eq!(receive.wait_until(deadline())?.1.byte_len(), 8);
        Ok::<_, TransportError>(())
    })
    .unwrap();
    assert_eq!(&far[0].to_ne_bytes(), b"inline!!");
    drop((near, far));
    let (one, two) = ends;
    assert_eq!(close(one), ChannelClosed::Drained);
    drop(two);
    drop(sides);
    nothing_is_left();
}

/// The receiver says, outside of RDMA, how many messages it has room for.
#[test]
fn a_window_of_messages_flies_in_one_scope() {
    const WINDOW: usize = 8;
    const MESSAGES: u64 = 400;
    let _alone = alone("window", 240);
    let sides = sides();
    let (mut one, mut two) = connect(builder(&sides.0), builder(&sides.1));
    let (mut source, mut sink) = (sides.0.region(WINDOW * 256), sides.1.region(WINDOW * 256));
    let (credit, credits) = mpsc::channel();
    thread::scope(|threads| {
        let one = &mut one;
        let source = &mut source;
        threads.spawn(move || {
            let mut idle: Vec<_> = source.slice_mut(..).unwrap().chunks(256).unwrap().collect();
            one.manual_scope(|s| {
                let mut flying: VecDeque<ScopedPendingWork<'_, _>> = VecDeque::new();
                for message in 0..MESSAGES {
                    let mut buffer = match idle.pop() {
                        Some(buffer) => buffer,
                        None => flying.pop_front().unwrap().wait_until(deadline())?.0,
                    };
                    buffer.fill(message);
                    credits.recv_timeout(PATIENCE).unwrap();
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
                credit.send(()).unwrap();
            }
            for message in 0..MESSAGES {
                let slot = &mut ring[message as usize % WINDOW];
                let (part, completion) = slot.take().unwrap().wait_until(deadline())?;
                assert_eq!(completion.byte_len(), 2048);
                assert!(part.iter().all(|&number| number == message), "message {message}");
                if message + (WINDOW as u64) < MESSAGES {
                    *slot = Some(s.post_receive(part)?);
                    credit.send(()).unwrap();
                }
            }
            Ok::<_, TransportError>(())
        })
        .unwrap();
    });
    drop((one, two, source, sink, sides));
    nothing_is_left();
}

/// Writes and reads; those that the peer's device refuses end the connection, and not the next one.
#[test]
fn memory_is_written_and_read_from_afar() {
    let _alone = alone("memory", 240);
    let sides = sides();
    let mut ends = connect(builder(&sides.0), builder(&sides.1));
    let target = SharedMemoryRegion::<u64>::new(&sides.1.domain, 1024, ACCESS).unwrap();
    // On iWARP a read is a write of the peer, into memory that peers may write.
    let local = SharedMemoryRegion::<u64>::new(&sides.0.domain, 1024, ACCESS).unwrap();
    let remote = target.remote();
    let all = || local.slice(..).unwrap();
    for round in 1..3 {
        local.write(0, &(0..1024).map(|n| round * n).collect::<Vec<_>>()).unwrap();
        let one = &mut ends.0;
        one.until(deadline()).write(all(), remote).unwrap();
        one.write(Inline(&7_u64.to_ne_bytes()), remote.sub_region(80, 8).unwrap()).unwrap();
        let pieces = (local.slice(2..3).unwrap(), local.slice(100..101).unwrap());
        let part = remote.sub_region(160, 16).unwrap();
        one.until(deadline()).write(pieces, part).unwrap();
        // A completed write may be on its way until a read returns.
        local.zero();
        one.until(deadline()).read(&mut all(), remote).unwrap();
        assert_eq!(local.to_vec(), target.to_vec());
        let at = |index| local.read_one(index).unwrap();
        assert_eq!([at(9), at(10), at(1023)], [9 * round, 7, 1023 * round]);
        assert_eq!([at(20), at(21)], [2 * round, 100 * round]);
        one.scope(|s| {
            let (low, high) = local.slice(..128)?.split_at(64)?;
            let first = s.post_read(low, remote.sub_region(512, 512)?)?;
            let second = s.post_read(high, remote.sub_region(1024, 512)?)?;
            second.wait_until(deadline())?;
            first.wait_until(deadline()).map(drop)
        })
        .unwrap();
        assert!(local.slice(..128).unwrap().to_vec().into_iter().eq((64..192).map(|n| n * round)));
        // The rkey does not allow this.
        let outside = ibverbs::RemoteMemoryRegion::new(remote.address() + 8192, 8, remote.rkey());
        let error = one.until(deadline()).read(&mut local.slice(..1).unwrap(), outside.unwrap());
        assert!(error.unwrap_err().work_error().is_some());
        // Soft-iWARP does not even flush what is posted now: the channel notices after a while.
        if round == 1 {
            match one.write(Inline(&[0; 8]), remote).unwrap_err() {
                TransportError::Work(error) => assert_eq!(error.class(), WorkErrorClass::Flushed),
                TransportError::Verbs(error) => {
                    assert_eq!(error.raw_os_error(), Some(libc::ENOTCONN))
                }
                error => panic!("{error}"),
            }
        }
        ends = reconnect(ends);
        exchange(&sides, &mut ends);
    }
    drop((ends, target, local, sides));
    nothing_is_left();
}

#[test]
fn what_never_arrives_ends_in_time() {
    let _alone = alone("never arrives", 240);
    let sides = sides();
    let mut ends = connect(builder(&sides.0), builder(&sides.1));
    let mut region = sides.0.region(64);
    for round in 0..4 {
        exchange(&sides, &mut ends);
        let start = Instant::now();
        let soon = start + Duration::from_millis(100);
        let one = &mut ends.0;
        let late = if round % 2 == 0 {
            one.until(soon).receive(region.slice_mut(..).unwrap()).unwrap_err()
        } else {
            one.scope_until(soon, |s| {
                for part in region.slice_mut(..)?.chunks(8)? {
                    std::mem::forget(s.post_receive(part)?);
                }
                Ok::<_, TransportError>(())
            })
            .unwrap_err()
            .into()
        };
        assert_eq!(late, TransportError::TimedOut);
        assert!(start.elapsed() >= Duration::from_millis(100));
        assert!(start.elapsed() < PATIENCE, "{:?}", start.elapsed());
        region.fill(round);
        assert_eq!(one.receive(()).unwrap_err(), TransportError::Stopped);
        ends = reconnect(ends);
    }
    exchange(&sides, &mut ends);
    drop((ends, region, sides));
    nothing_is_left();
}

#[test]
fn errors_and_panics_flush_what_is_in_flight() {
    let _alone = alone("errors and panics", 240);
    let sides = sides();
    let mut ends = connect(builder(&sides.0), builder(&sides.1));
    let mut region = sides.0.region(64);
    let error = ends.0.scope(|s| {
        let mut first = None;
        for part in region.slice_mut(..).unwrap().chunks(8).unwrap() {
            first = first.or(Some(s.post_receive(part).unwrap()));
        }
        assert!(first.unwrap().poll().is_none());
        Err::<(), _>("enough")
    });
    assert_eq!(error, Err(ScopeError::Closure("enough")));
    ends = reconnect(ends);
    let one = &mut ends.0;
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
    ends = reconnect(ends);
    exchange(&sides, &mut ends);
    let (mut one, two) = ends;
    // SAFETY: the region outlives the channel, which ends the receive.
    let _work =
        unsafe { one.post_unpolled(ReceiveWorkRequest::new(region.slice_mut(..).unwrap())) }
            .unwrap();
    assert_eq!(close(one), ChannelClosed::Flushed(1));
    drop((two, region, sides));
    nothing_is_left();
}

#[test]
fn a_channel_sleeps_until_something_arrives() {
    let _alone = alone("sleeps", 240);
    let sides = sides();
    let sleepy = |side: &Side| builder(side).sleep_after(10);
    let mut ends = connect(sleepy(&sides.0), sleepy(&sides.1));
    exchange(&sides, &mut ends);
    let (one, two) = (&mut ends.0, &mut ends.1);
    let mut region = sides.1.region(1);
    let (began, before) = (Instant::now(), cpu_time());
    thread::scope(|threads| {
        two.scope(|s| {
            let receive = s.post_receive(region.slice_mut(..)?)?;
            threads.spawn(|| {
                thread::sleep(Duration::from_secs(2));
                one.until(deadline()).send(Inline(b"")).unwrap();
            });
            receive.wait_until(deadline()).map(drop)
        })
        .unwrap();
    });
    // Busy waiting takes all of the time. Sleeping takes little, but on a busy host, a machine counts time in which it stood
    // still as its program's.
    let (took, spent) = (began.elapsed(), cpu_time() - before);
    assert!(spent < took / 2, "of {took:?}, it was busy for {spent:?}");
    let soon = Instant::now() + Duration::from_millis(50);
    let late = two.until(soon).receive(region.slice_mut(..).unwrap());
    assert_eq!(late.unwrap_err(), TransportError::TimedOut);
    drop((ends, region, sides));
    nothing_is_left();
}

/// The processor time of this process so far.
fn cpu_time() -> Duration {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let fields: Vec<_> = stat.rsplit_once(") ").unwrap().1.split(' ').collect();
    let ticks: u64 = fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap();
    Duration::from_millis(ticks * 10)
}
