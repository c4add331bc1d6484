//! Stopping a channel when the device does not release its buffers.

use std::process::Command;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use ibverbs::channel::ScopeError;
use ibverbs::{ReceiveWorkRequest, SendWorkRequest, TransportError, ffi};
use ibverbs_function_device::{FunctionDevice, Kind};

use crate::pair::{ModelPair as Pair, builder, connect, domain, outstanding, queue, soon};

/// Leaves a receive in flight in a scope that has to stop the channel.
fn force(pair: &mut Pair) -> Result<(), ScopeError<&'static str>> {
    let mut region = pair.region(8, 0);
    let result = pair.one.scope(|s| {
        std::mem::forget(s.post_receive(region.slice_mut(..).unwrap()).unwrap());
        Err("give up")
    });
    // The scope has ended, so nothing accesses the region any more.
    assert_eq!(pair.device.violations().0, 0);
    result
}

fn states(device: &FunctionDevice, count: u32) -> Vec<ffi::ibv_qp_state> {
    (0..count)
        .rev()
        .map(|back| device.call_before("modify_qp", back).unwrap().qp_attr.qp_state)
        .collect()
}

const ERR: ffi::ibv_qp_state = ffi::ibv_qp_state::IBV_QPS_ERR;
const RESET: ffi::ibv_qp_state = ffi::ibv_qp_state::IBV_QPS_RESET;

#[test]
fn flushing_is_enough_if_the_device_answers() {
    let mut pair = Pair::new();
    let modified = pair.device.calls("modify_qp");
    force(&mut pair).unwrap_err();
    assert_eq!(pair.device.calls("modify_qp"), modified + 1);
    assert_eq!(states(&pair.device, 1), [ERR]);
    assert_eq!(outstanding(&pair.device, &pair.one), (0, 0));
    pair.reconnect().finish();
}

#[test]
fn without_flushed_completions_the_queue_pair_is_reset() {
    let mut pair = Pair::new();
    pair.device.hold_completions(queue(&pair.one), 0, true);
    let start = Instant::now();
    force(&mut pair).unwrap_err();
    assert!(start.elapsed() >= Duration::from_millis(50), "the settle timeout");
    assert!(start.elapsed() < Duration::from_secs(60));
    assert_eq!(states(&pair.device, 2), [ERR, RESET]);
    assert_eq!(outstanding(&pair.device, &pair.one), (0, 0));
    pair.device.hold_completions(queue(&pair.one), 0, false);
    pair.reconnect().finish();
}

/// An unknown completion that arrives among the flushed ones counts as none of them.
#[test]
fn a_stranger_does_not_count_as_flushed() {
    let mut pair = Pair::new();
    let completions = queue(&pair.one);
    pair.device.hold_completions(completions, 0, true);
    let stranger = ffi::ibv_wc { wr_id: 4711, qp_num: pair.one.number(), ..Default::default() };
    // The first error ends the call. The second is there when the receive is to be flushed.
    pair.device.inject(completions, &stranger);
    pair.device.inject(completions, &stranger);
    let error = pair.one.receive(()).unwrap_err();
    assert!(matches!(error, TransportError::UnknownCompletion { .. }), "{error}");
    assert_eq!(states(&pair.device, 2), [ERR, RESET]);
    pair.device.hold_completions(completions, 0, false);
    pair.reconnect().finish();
}

/// A provider whose queue never runs out of unknown completions.
#[test]
fn a_flood_of_strangers_does_not_keep_a_channel_for_ever() {
    type Poll = unsafe extern "C" fn(*mut ffi::ibv_cq, i32, *mut ffi::ibv_wc) -> i32;
    static REAL: OnceLock<Poll> = OnceLock::new();
    static FLOOD: AtomicU32 = AtomicU32::new(0);
    unsafe extern "C" fn poll(queue: *mut ffi::ibv_cq, max: i32, found: *mut ffi::ibv_wc) -> i32 {
        let number = FLOOD.load(Ordering::Relaxed);
        // SAFETY: it is called as the real one is, with room for one at least.
        unsafe {
            if number == 0 {
                return REAL.get().unwrap()(queue, max, found);
            }
            *found = ffi::ibv_wc { wr_id: 4711, qp_num: number, ..Default::default() };
        }
        1
    }
    let device = FunctionDevice::model();
    let domain = domain(&device);
    // SAFETY: the context is live, and nobody else uses it yet.
    let real = unsafe { (*domain.context().as_raw()).ops.poll_cq.replace(poll) };
    REAL.set(real.unwrap()).unwrap();
    let (one, two) = connect(builder(&domain), builder(&domain));
    let mut pair = Pair { one, two, domain, device };
    FLOOD.store(pair.one.number(), Ordering::Relaxed);
    let start = Instant::now();
    force(&mut pair).unwrap_err();
    FLOOD.store(0, Ordering::Relaxed);
    assert!(start.elapsed() < Duration::from_secs(60));
    assert_eq!(states(&pair.device, 2), [ERR, RESET]);
    pair.reconnect().finish();
}

#[test]
fn a_queue_pair_that_cannot_go_to_the_error_state_is_reset() {
    let mut pair = Pair::new();
    pair.device.fail("modify_qp").errno(libc::EIO).times(1);
    force(&mut pair).unwrap_err();
    assert_eq!(states(&pair.device, 2), [ERR, RESET]);
    assert_eq!(outstanding(&pair.device, &pair.one), (0, 0));
    let mut pair = pair.reconnect();
    pair.exchange();
    pair.finish();
}

#[test]
fn a_queue_pair_that_cannot_be_reset_is_destroyed() {
    let mut pair = Pair::new();
    pair.device.fail("modify_qp").errno(libc::EIO).always();
    let number = pair.one.number();
    force(&mut pair).unwrap_err();
    assert_eq!(pair.device.live(Kind::QueuePair), 1);
    pair.device.clear_faults();
    assert_eq!((pair.one.number(), pair.one.as_raw()), (number, std::ptr::null_mut()));
    assert_eq!(pair.one.send(()).unwrap_err(), TransportError::Closed);
    assert_eq!(pair.one.until(soon()).receive(()).unwrap_err(), TransportError::Closed);
    let error = pair.one.scope(|s| s.post_send(()).map(drop)).unwrap_err();
    assert_eq!(error, ScopeError::Closure(TransportError::Closed));
    // SAFETY: nothing is posted.
    let error = unsafe { pair.one.post_unpolled(SendWorkRequest::new(())) }.unwrap_err();
    assert_eq!(error, TransportError::Closed);
    assert!(format!("{:?}", pair.one).contains("destroyed: true"));
    let Pair { one, two, domain, device } = pair;
    assert!(one.reset().is_err());
    drop((two, domain));
    device.assert_clean();
}

#[test]
fn a_device_that_dies_lets_go_too() {
    let mut pair = Pair::new();
    let mut region = pair.region(8, 0);
    let result = pair.one.scope(|s| {
        let (first, second) = region.slice_mut(..)?.split_at(4)?;
        let mut receive = s.post_receive(first)?;
        assert!(receive.poll().is_none());
        std::mem::forget(s.post_receive(second)?);
        pair.device.kill();
        // All that was posted has been flushed.
        receive.wait().map(drop)
    });
    let ScopeError::Closure(error) = result.unwrap_err() else { panic!("it was waited for") };
    assert_eq!(error.work_error().unwrap().status(), ibverbs::WorkStatus::Flushed);
    assert_eq!(pair.device.violations().0, 0);
    // Nothing is left that would need a reset.
    assert!(pair.one.send(()).is_err() && pair.one.reset().is_err());
    drop(region);
    drop((pair.two, pair.domain));
    pair.device.assert_clean();
}

#[test]
fn a_handle_whose_queue_pair_was_reset_tells_so() {
    let mut pair = Pair::new();
    pair.device.hold_completions(queue(&pair.one), 0, true);
    let mut region = pair.region(8, 0);
    pair.one
        .scope(|s| {
            let (first, second) = region.slice_mut(..)?.split_at(4)?;
            let (first, mut second) = (s.post_receive(first)?, s.post_receive(second)?);
            assert_eq!(first.wait_until(soon()).unwrap_err(), TransportError::TimedOut);
            assert_eq!(second.poll().unwrap().unwrap_err(), TransportError::Stopped);
            assert_eq!(second.wait().unwrap_err(), TransportError::Stopped);
            Ok::<_, TransportError>(())
        })
        .unwrap_or_else(|error| assert_eq!(error, ScopeError::Exit(TransportError::Stopped)));
    assert_eq!(outstanding(&pair.device, &pair.one), (0, 0));
    drop(region);
    pair.finish();
}

/// Runs the test of that name in a process of its own, where it takes its other branch.
fn in_child(name: &str) -> std::process::Output {
    Command::new(std::env::current_exe().unwrap())
        .args([name, "--exact", "--nocapture", "--test-threads=1"])
        .env("CHANNEL_TEST_CHILD", name)
        .output()
        .unwrap()
}

pub(crate) fn is_child(name: &str) -> bool {
    std::env::var_os("CHANNEL_TEST_CHILD").is_some_and(|child| child == name)
}

#[track_caller]
pub(crate) fn assert_aborts(name: &str) {
    use std::os::unix::process::ExitStatusExt;

    let output = in_child(name);
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.signal(), Some(libc::SIGABRT), "{error}");
    assert!(error.contains("could be neither flushed, reset nor destroyed"), "{error}");
    assert!(!error.contains("still here"), "{error}");
}

fn break_everything(device: &FunctionDevice) {
    device.fail("modify_qp").errno(libc::EIO).always();
    device.fail("destroy_qp").errno(libc::EIO).always();
}

#[test]
fn when_nothing_helps_the_process_aborts() {
    const NAME: &str = "settling::when_nothing_helps_the_process_aborts";
    if is_child(NAME) {
        let mut pair = Pair::new();
        break_everything(&pair.device);
        let _ = force(&mut pair);
        eprintln!("still here");
        return;
    }
    assert_aborts(NAME);
}

#[test]
fn when_nothing_helps_a_blocking_call_aborts() {
    const NAME: &str = "settling::when_nothing_helps_a_blocking_call_aborts";
    if is_child(NAME) {
        let mut pair = Pair::new();
        break_everything(&pair.device);
        let _ = pair.one.until(soon()).receive(());
        eprintln!("still here");
        return;
    }
    assert_aborts(NAME);
}

#[test]
fn when_nothing_helps_dropping_aborts_if_work_is_in_flight() {
    const NAME: &str = "settling::when_nothing_helps_dropping_aborts_if_work_is_in_flight";
    if is_child(NAME) {
        let mut pair = Pair::new();
        let mut region = pair.region(8, 0);
        // SAFETY: the region outlives the channel, or else the process does not.
        let _ = unsafe {
            pair.one.post_unpolled(ReceiveWorkRequest::new(region.slice_mut(..).unwrap()))
        };
        break_everything(&pair.device);
        drop(pair.one);
        eprintln!("still here");
        return;
    }
    assert_aborts(NAME);
}

#[test]
fn a_destroy_that_fails_leaks_the_queue_pair_if_nothing_is_in_flight() {
    let pair = Pair::new();
    pair.device.fail("destroy_qp").errno(libc::EBUSY).times(1);
    let Pair { one, two, domain, device } = pair;
    drop((one, two));
    assert_eq!(device.live(Kind::QueuePair), 1);
    drop(domain);
    assert_eq!(device.live(Kind::ProtectionDomain), 1, "it is leaked with its queue pair");
}
