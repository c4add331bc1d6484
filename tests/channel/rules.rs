//! Which completion ends which operation: a failed poll ends none, and neither does a completion of another
//! queue pair.

use std::time::Duration;

use ibverbs::channel::ScopeError;
use ibverbs::{Inline, TransportError, ffi};
use ibverbs_function_device::{FunctionDevice, Progress};

use crate::pair::{ModelPair as Pair, outstanding, peek, queue, soon};

fn is_poll_error(error: TransportError) -> bool {
    matches!(error, TransportError::Verbs(error) if error.verb() == "ibv_poll_cq")
}

/// A message that arrives after the poll error still lands in borrowed memory: the scope must not have ended.
#[test]
fn a_poll_error_within_a_scope_releases_nothing() {
    let device = FunctionDevice::model();
    device.progress(Progress::Manual);
    let mut pair = Pair::with(device, |builder| builder);
    let (outgoing, mut incoming) = (pair.region(8, 1), pair.region(8, 0));
    incoming.fill(0);
    let device = &pair.device;
    let (one, two) = (&mut pair.one, &mut pair.two);
    let (number, at) = (two.number(), incoming.as_ptr());
    let mut failed = 0;
    two.scope(|two| {
        let mut receive = two.post_receive(incoming.slice_mut(..)?)?;
        device.fail("poll_cq").errno(libc::EIO).times(3);
        assert!(is_poll_error(receive.poll().unwrap().unwrap_err()));
        assert!(is_poll_error(receive.spin_poll().unwrap_err()));
        failed += usize::from(is_poll_error(receive.wait().unwrap_err()));
        assert_eq!(device.outstanding(number), (0, 1));
        one.scope(|one| {
            let send = one.post_send(outgoing.slice(..)?)?;
            assert_eq!(peek(at, 8), [0; 8]);
            // The poll error must not have ended the borrow of this write's buffer.
            device.run();
            assert_eq!(peek(at, 8), outgoing[..]);
            send.wait()
        })
        .unwrap();
        Ok::<_, TransportError>(())
    })
    .unwrap();
    assert_eq!(failed, 1);
    assert_eq!(outstanding(&pair.device, &pair.two), (0, 0));
    assert_eq!(incoming[..], outgoing[..]);
    drop((outgoing, incoming));
    pair.finish();
}

/// If every poll fails, the scope stops the channel, and ends with nothing in flight.
#[test]
fn a_queue_that_cannot_be_polled_is_reset() {
    let mut pair = Pair::new();
    let mut region = pair.region(8, 0);
    let device = &pair.device;
    let result = pair.one.scope(|s| {
        std::mem::forget(s.post_receive(region.slice_mut(..)?)?);
        device.fail("poll_cq").errno(libc::EIO).always();
        Ok::<_, TransportError>(())
    });
    let Err(ScopeError::Exit(error)) = result else { panic!("{result:?}") };
    assert!(is_poll_error(error));
    assert_eq!(outstanding(device, &pair.one), (0, 0));
    let state = device.last_call("modify_qp").unwrap().qp_attr.qp_state;
    assert_eq!(state, ffi::ibv_qp_state::IBV_QPS_RESET);
    assert_eq!(pair.one.send(()).unwrap_err(), TransportError::Stopped);
    device.clear_faults();
    let mut pair = pair.reconnect();
    pair.exchange();
    drop(region);
    pair.finish();
}

#[test]
fn a_blocking_call_ends_with_the_poll_error_and_nothing_in_flight() {
    for times in [1, 5, u32::MAX] {
        let mut pair = Pair::new();
        let mut region = pair.region(8, 0);
        pair.device.fail("poll_cq").errno(libc::EIO).times(times);
        let error = pair.one.receive(region.slice_mut(..).unwrap()).unwrap_err();
        assert!(is_poll_error(error), "{error}");
        assert_eq!(outstanding(&pair.device, &pair.one), (0, 0));
        pair.device.clear_faults();
        let mut pair = pair.reconnect();
        pair.exchange();
        drop(region);
        pair.finish();
    }
}

/// mlx5 returns -2, some providers an errno value.
#[test]
fn any_negative_number_is_an_error() {
    for value in [-1, -2, -libc::EIO, i32::MIN] {
        let mut pair = Pair::new();
        pair.device.poll_error(value);
        pair.device.fail("poll_cq").errno(libc::EIO).times(1);
        let error = pair.one.receive(()).unwrap_err();
        assert!(is_poll_error(error), "{value}: {error}");
        pair.finish();
    }
}

/// Completions that end no operation: of a slot that does not exist or is free, of another request of the slot, of
/// another queue pair. Only slot 0 is in flight, by the request `first`.
fn strangers(first: u64, number: u32) -> Vec<ffi::ibv_wc> {
    let all = [
        (0, number),
        (7, number),
        (u64::MAX, number),
        (0xdead_beef_0000_0000, number),
        (first + (1 << 32), number),
        (first | 3, number),
        // The slots of a blocking operation and of the flow control, and one that does not exist.
        (first | 8, number),
        (first | 9, number),
        (first | 10, number),
        (first | 0x3fff_ffff, number),
        (first | 0x4000_0000, number),
        (first | 0x7fff_ffff, number),
        (first | 0xffff_ffff, number),
        (first, number + 1),
        (first, 0xff_ffff),
    ];
    all.map(|(wr_id, qp_num)| ffi::ibv_wc { wr_id, qp_num, ..Default::default() }).to_vec()
}

#[test]
fn an_unknown_completion_ends_no_operation_of_a_scope() {
    let device = FunctionDevice::model();
    device.progress(Progress::Manual);
    let mut pair = Pair::with(device, |builder| builder);
    let target = pair.shared(1);
    let (device, completions, number) = (&pair.device, queue(&pair.one), pair.one.number());
    pair.one
        .scope(|s| {
            let mut write = s.post_write(Inline(&[1; 8]), target.remote())?;
            let first = device.posted(0).unwrap().wr_id;
            assert_eq!(first as u32, 0, "the first slot");
            for stranger in strangers(first, number) {
                device.inject(completions, &stranger);
                let (queue_pair, wr_id) = (stranger.qp_num, stranger.wr_id);
                let expected = TransportError::UnknownCompletion { queue_pair, wr_id };
                assert_eq!(write.poll().unwrap().unwrap_err(), expected);
                assert_eq!(device.outstanding(number), (1, 0));
                assert!(write.poll().is_none(), "it is still in flight");
            }
            device.run();
            write.spin_poll()
        })
        .unwrap();
    drop(target);
    pair.finish();
}

#[test]
fn an_unknown_completion_ends_a_blocking_call_with_nothing_in_flight() {
    let mut pair = Pair::new();
    let stranger = ffi::ibv_wc { wr_id: 4711, qp_num: pair.one.number(), ..Default::default() };
    pair.device.inject(queue(&pair.one), &stranger);
    let mut region = pair.region(8, 0);
    let error = pair.one.receive(region.slice_mut(..).unwrap()).unwrap_err();
    let queue_pair = pair.one.number();
    assert_eq!(error, TransportError::UnknownCompletion { queue_pair, wr_id: 4711 });
    assert!(error.to_string().contains("0x1267"), "{error}");
    assert_eq!(outstanding(&pair.device, &pair.one), (0, 0));
    let mut pair = pair.reconnect();
    pair.exchange();
    drop(region);
    pair.finish();
}

/// The completion that the first poll finds is checked in the same way, even if its number is the awaited
/// one.
#[test]
fn a_completion_of_another_queue_pair_ends_nothing_though_its_number_fits() {
    let device = FunctionDevice::model();
    device.progress(Progress::Manual);
    let mut pair = Pair::with(device, |builder| builder);
    let target = pair.shared(1);
    let (device, completions) = (pair.device.clone(), queue(&pair.one));
    let number = pair.one.number();
    let other = number + 1;
    let stranger = |wr_id| ffi::ibv_wc { wr_id, qp_num: other, ..Default::default() };
    let result = pair.one.scope(|s| {
        let write = s.post_write(Inline(&[1; 8]), target.remote())?;
        let wr_id = device.posted(0).unwrap().wr_id;
        device.inject(completions, &stranger(wr_id));
        let error = write.wait_until(soon()).unwrap_err();
        assert_eq!(error, TransportError::UnknownCompletion { queue_pair: other, wr_id });
        assert_eq!(device.outstanding(number), (1, 0), "it is still in flight");
        device.run();
        Ok::<_, TransportError>(())
    });
    result.unwrap();
    // The next one has the same number, as this one completes.
    device.progress(Progress::OnPoll);
    pair.one.write(Inline(&[1; 8]), target.remote()).unwrap();
    let blocking = device.posted(0).unwrap().wr_id;
    device.inject(completions, &stranger(blocking));
    let error = pair.one.until(soon()).receive(()).unwrap_err();
    assert_eq!(device.posted(0).unwrap().wr_id, blocking);
    assert_eq!(error, TransportError::UnknownCompletion { queue_pair: other, wr_id: blocking });
    assert_eq!(outstanding(&device, &pair.one), (0, 0));
    drop(target);
    pair.finish();
}

/// A device that completes a request twice, when the slot of the request has the next one.
struct Twice {
    pair: Pair,
    target: ibverbs::SharedMemoryRegion<'static, u64>,
    completion: ffi::ibv_wc,
}

impl Twice {
    fn new() -> Self {
        let device = FunctionDevice::model();
        // A queue of one slot.
        let mut pair = Pair::with(device, |builder| builder.max_send_wr(1));
        let target = pair.shared(1);
        let remote = target.remote();
        pair.one.scope(|s| s.post_write(Inline(&[1; 8]), remote)?.wait().map(drop)).unwrap();
        let wr_id = pair.device.posted(0).unwrap().wr_id;
        let completion = ffi::ibv_wc { wr_id, qp_num: pair.one.number(), ..Default::default() };
        pair.device.progress(Progress::Manual);
        Self { pair, target, completion }
    }

    /// The device completes the first request again. `poll` meets that completion, which ends nothing.
    #[track_caller]
    fn again(
        device: &FunctionDevice,
        completion: &ffi::ibv_wc,
        poll: impl FnOnce() -> TransportError,
    ) {
        let ffi::ibv_wc { wr_id, qp_num: queue_pair, .. } = *completion;
        let posted = device.posted(0).unwrap().wr_id;
        assert_eq!(posted as u32, wr_id as u32, "it has the same slot");
        assert_ne!(posted, wr_id, "and a number of its own");
        assert_eq!(poll(), TransportError::UnknownCompletion { queue_pair, wr_id });
        assert_eq!(device.outstanding(queue_pair), (1, 0), "the device still has it");
    }
}

#[test]
fn a_completion_that_comes_twice_ends_no_operation_of_a_scope() {
    let Twice { mut pair, target, completion } = Twice::new();
    let (device, completions, remote) = (pair.device.clone(), queue(&pair.one), target.remote());
    for all_at_once in [false, true] {
        pair.one
            .scope(|s| {
                let mut write = s.post_write(Inline(&[1; 8]), remote)?;
                if all_at_once {
                    drop(write);
                    for _ in 0..2 {
                        device.inject(completions, &completion);
                        Twice::again(&device, &completion, || s.wait_all().unwrap_err());
                        assert!(!s.can_post_send());
                    }
                } else {
                    device.inject(completions, &completion);
                    Twice::again(&device, &completion, || write.poll().unwrap().unwrap_err());
                    assert!(write.poll().is_none());
                }
                device.run();
                Ok::<_, TransportError>(())
            })
            .unwrap();
    }
    drop(target);
    pair.finish();
}

/// The device leaves completions in the queue when a queue pair is reset.
#[test]
fn what_an_earlier_connection_left_is_not_heeded() {
    let mut pair = Pair::new();
    pair.device.keep_stale_completions(true);
    let mut region = pair.region(8, 0);
    for _ in 0..3 {
        // The completions exist but are held back past the settle timeout, so the queue pair is reset.
        let (device, completions) = (pair.device.clone(), queue(&pair.one));
        device.hold_completions(completions, 0, true);
        let mut receive = region.slice_mut(..).unwrap();
        let late = pair.one.until(soon()).receive(&mut receive).unwrap_err();
        assert_eq!(late, TransportError::TimedOut);
        assert_eq!(device.held(completions), 1);
        pair = pair.reconnect();
        // Now they arrive, for the same queue pair and the same slot.
        let start = std::time::Instant::now();
        let late = pair.one.scope(|s| {
            let mut receive = s.post_receive(region.slice_mut(..)?)?;
            device.hold_completions(completions, 0, false);
            device.release_all(completions);
            for _ in 0..10 {
                assert!(receive.poll().is_none(), "a completion of an earlier connection");
            }
            receive.wait_until(soon())
        });
        assert!(start.elapsed().as_millis() >= 20);
        assert_eq!(late.unwrap_err(), ScopeError::Closure(TransportError::TimedOut));
        pair = pair.reconnect();
        pair.exchange();
    }
    drop(region);
    pair.finish();
}

/// The time that settling may take can pass while the thread has no processor.
#[test]
fn a_queue_is_emptied_however_little_time_there_is() {
    let device = FunctionDevice::model();
    device.keep_stale_completions(true);
    let mut pair = Pair::with(device, |builder| builder.settle_timeout(Duration::ZERO));
    let mut region = pair.region(8, 0);
    for _ in 0..3 {
        let (device, completions) = (pair.device.clone(), queue(&pair.one));
        device.hold_completions(completions, 0, true);
        let parts = region.slice_mut(..).unwrap().chunks(2).unwrap();
        let stopped = pair.one.scope(|s| {
            parts.into_iter().try_for_each(|part| s.post_receive(part).map(std::mem::forget))?;
            Err::<(), _>(TransportError::TimedOut)
        });
        assert_eq!(stopped.unwrap_err(), ScopeError::Closure(TransportError::TimedOut));
        assert_eq!(device.held(completions), 4);
        device.hold_completions(completions, 0, false);
        device.release_all(completions);
        pair = pair.reconnect();
        pair.exchange();
    }
    drop(region);
    pair.finish();
}

#[test]
fn a_full_queue_is_emptied_whatever_its_completions_are_of() {
    let pair = Pair::new();
    let completions = queue(&pair.one);
    // SAFETY: the queue lives as long as the pair.
    let capacity = unsafe { (*completions).cqe };
    let first = pair.one.number();
    for index in 0..capacity {
        let stranger = ffi::ibv_wc {
            wr_id: index as u64,
            qp_num: first + (index % 2) as u32,
            ..Default::default()
        };
        pair.device.inject(completions, &stranger);
    }
    let mut pair = pair.reconnect();
    pair.exchange();
    pair.finish();
}
