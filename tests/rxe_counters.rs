//! The counters of Soft-RoCE, and the memory that the kernel has pinned. To be run by `script/test rxe`, in the machine
//! that `script/vm` starts.

#[path = "support/vm/mod.rs"]
mod vm;

use std::thread;
use std::time::{Duration, Instant};

use ibverbs::device::{Counter, process_resources};

use vm::channels::{connect, deadline, exchange, nothing_is_left, sides};
use vm::{PATIENCE, one_at_a_time};

#[test]
fn traffic_moves_the_counters_of_both_ports() {
    let _lock = one_at_a_time();
    let sides = sides();
    let (one, two) = (&sides.0.context, &sides.1.context);
    let (mut near, mut far) = connect(sides.0.builder(), sides.1.builder());
    let before = [one, two].map(|context| context.port_counters(1).unwrap());
    exchange(&sides, &mut near, &mut far);

    // A message that comes before its receive is posted is refused, and sent again.
    let source = sides.0.region(1);
    let mut sink = sides.1.region(1);
    thread::scope(|threads| {
        threads.spawn(|| near.until(deadline()).send(source.slice(..).unwrap()).unwrap());
        let start = Instant::now();
        let refused =
            || one.port_counters(1).unwrap().since(&before[0]).get(Counter::RnrNaksReceived);
        while refused().unwrap_or(0) == 0 {
            assert!(start.elapsed() < PATIENCE, "nothing was refused");
            thread::sleep(Duration::from_millis(20));
        }
        far.until(deadline()).receive(sink.slice_mut(..).unwrap()).unwrap();
    });

    let moved = [one, two].map(|context| context.port_counters(1).unwrap());
    let moved = [moved[0].since(&before[0]), moved[1].since(&before[1])];
    for moved in &moved {
        assert!(moved.get(Counter::SentPackets).unwrap_or(0) >= 2, "{moved:?}");
        assert!(moved.get(Counter::ReceivedPackets).unwrap_or(0) >= 2, "{moved:?}");
        assert_eq!(moved.get(Counter::RetriesExceeded), None, "{moved:?}");
    }
    assert!(moved[1].get(Counter::ReceiverNotReady).unwrap_or(0) >= 1, "{moved:?}");

    let device = ibverbs::devices().unwrap();
    let device = device.iter().find(|device| device.name() == "rxe0").unwrap();
    let names = |counters: ibverbs::device::Counters| -> Vec<String> {
        counters.iter().map(|(name, _)| name.to_owned()).collect()
    };
    assert_eq!(names(device.port_counters(1).unwrap()), names(one.port_counters(1).unwrap()));
    assert!(device.counters().unwrap().is_empty(), "rxe has counters of ports alone");
    assert_eq!(one.port_counters(2).unwrap_err().raw_os_error(), Some(libc::ENOENT));
    drop((near, far, source, sink));
    nothing_is_left(sides);
}

#[test]
fn registered_memory_is_pinned() {
    const BYTES: usize = 1 << 20;
    let _lock = one_at_a_time();
    let sides = sides();
    let before = process_resources().unwrap();
    let region = sides.0.region(BYTES / 8);
    let with = process_resources().unwrap();
    assert_eq!(with.memory_regions, before.memory_regions + 1);
    // Whole pages; the region may touch one more.
    let grown = with.pinned_bytes - before.pinned_bytes;
    assert!((BYTES as u64..=BYTES as u64 + 4096).contains(&grown), "{grown}");
    drop(region);
    assert_eq!(process_resources().unwrap(), before);
    nothing_is_left(sides);
}
