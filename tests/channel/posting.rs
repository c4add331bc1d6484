//! Posted requests: what the device receives, and what happens when a post fails.

use std::cell::{Cell, RefCell};
use std::ffi::c_int;
use std::sync::{Arc, OnceLock};

use ibverbs::channel::{PendingWork, ScopeError};
use ibverbs::operation::LocalInvalidateWorkRequest;
use ibverbs::{
    Channel, Inline, ProtectionDomain, SendWorkRequest, TransportError, WriteWorkRequest,
    completion::WorkSuccess, ffi,
};
use ibverbs_function_device::{FunctionDevice, Progress};

use crate::pair::{ModelPair as Pair, builder, connect, outstanding, soon};

#[track_caller]
fn refused<T: std::fmt::Debug>(result: Result<T, TransportError>) {
    match result {
        Err(TransportError::Verbs(error)) => {
            assert_eq!((error.verb(), error.raw_os_error()), ("ibv_post_send", Some(libc::EACCES)));
        }
        other => panic!("{other:?}"),
    }
}

/// Soft-RoCE and Soft-iWARP queue a request before they tell the kernel. If telling fails, the request is
/// already where the kernel finds it.
fn fail_once(pair: &Pair) {
    pair.device.fail("ring_doorbell").errno(libc::EACCES).times(1);
}

#[track_caller]
fn is_stopped(pair: &mut Pair) {
    assert_eq!(outstanding(&pair.device, &pair.one), (0, 0), "the device still has it");
    assert_eq!(pair.one.send(()).unwrap_err(), TransportError::Stopped);
}

#[test]
fn no_blocking_request_is_left_with_the_device_though_posting_failed() {
    let mut pair = Pair::new();
    let (target, mut local) = (pair.shared(1), pair.region(8, 1));
    let remote = target.remote();
    type Post<'p> = &'p dyn Fn(&mut Channel<'_>) -> Result<WorkSuccess, TransportError>;
    let inline: Post<'_> = &|one| one.write(Inline(&[1; 8]), remote);
    let send: Post<'_> = &|one| one.until(soon()).send(());
    let write: Post<'_> = &|one| one.write((), remote);
    for post in [inline, send, write] {
        fail_once(&pair);
        refused(post(&mut pair.one));
        is_stopped(&mut pair);
        pair = pair.reconnect();
    }
    fail_once(&pair);
    refused(pair.one.read(&mut local.slice_mut(..).unwrap(), remote));
    is_stopped(&mut pair);
    pair = pair.reconnect();
    pair.exchange();
    drop((target, local));
    pair.finish();
}

type PostSend = unsafe extern "C" fn(
    *mut ffi::ibv_qp,
    *mut ffi::ibv_send_wr,
    *mut *mut ffi::ibv_send_wr,
) -> c_int;

static REAL: OnceLock<PostSend> = OnceLock::new();

thread_local! {
    static FAILS: Cell<bool> = const { Cell::new(false) };
}

/// Queues the request and fails like a provider that names no request, and leaves the place for it alone.
unsafe extern "C" fn queue_and_fail(
    queue_pair: *mut ffi::ibv_qp,
    request: *mut ffi::ibv_send_wr,
    bad: *mut *mut ffi::ibv_send_wr,
) -> c_int {
    let real = REAL.get().expect("it was set before this function");
    // SAFETY: it is called as the real one is.
    let returned = unsafe { real(queue_pair, request, bad) };
    if FAILS.take() { libc::EACCES } else { returned }
}

thread_local! {
    static POSTED: RefCell<Vec<(ffi::ibv_wr_opcode, u32, c_int)>> = const { RefCell::new(Vec::new()) };
}

/// Notes the opcode, the key or immediate data, and the number of pieces; then refuses the request.
unsafe extern "C" fn note_and_refuse(
    _: *mut ffi::ibv_qp,
    request: *mut ffi::ibv_send_wr,
    bad: *mut *mut ffi::ibv_send_wr,
) -> c_int {
    // SAFETY: it is called as the real one is: with a request, and a place for the one that is refused.
    unsafe {
        let ffi::ibv_send_wr { opcode, num_sge, __bindgen_anon_1: number, .. } = *request;
        POSTED.with_borrow_mut(|posted| posted.push((opcode, number.invalidate_rkey, num_sge)));
        *bad = request;
    }
    libc::EACCES
}

/// Invalidations have no prepared request of their own.
#[test]
fn an_invalidation_leaves_the_request_of_messages_with_an_immediate_as_it_was() {
    use ffi::ibv_wr_opcode as Opcode;

    let device = FunctionDevice::model();
    let context = Arc::new(device.context());
    // SAFETY: the context is live, and nothing else uses it yet.
    unsafe { (*context.as_raw()).ops.post_send = Some(note_and_refuse) };
    let domain = Arc::new(ProtectionDomain::new(&context).unwrap());
    let (one, two) = connect(builder(&domain), builder(&domain));
    let mut pair = Pair { one, two, domain, device };
    drop(context);
    let region = pair.region(8, 1);
    let bytes = region.slice(..).unwrap();
    let one = &mut pair.one;
    refused(one.run(SendWorkRequest::new(&bytes).invalidate(1)));
    refused(one.run(SendWorkRequest::new(&bytes).immediate(2)));
    refused(one.run(SendWorkRequest::new(&()).invalidate(3)));
    refused(one.run(SendWorkRequest::new(&bytes).immediate(4)));
    refused(one.run(LocalInvalidateWorkRequest::new(5)));
    refused(one.run(SendWorkRequest::new(&()).immediate(6)));
    let expected = [
        (Opcode::IBV_WR_SEND_WITH_INV, 1, 1),
        (Opcode::IBV_WR_SEND_WITH_IMM, 2_u32.to_be(), 1),
        (Opcode::IBV_WR_SEND_WITH_INV, 3, 0),
        (Opcode::IBV_WR_SEND_WITH_IMM, 4_u32.to_be(), 1),
        (Opcode::IBV_WR_LOCAL_INV, 5, 0),
        (Opcode::IBV_WR_SEND_WITH_IMM, 6_u32.to_be(), 0),
    ];
    assert_eq!(POSTED.take(), expected);
    drop(region);
    pair.finish();
}

/// A send that is refused for lack of credit does not reach the provider, so its error is not the provider's.
#[test]
fn no_request_is_left_with_the_device_though_a_send_was_refused_before_for_lack_of_credit() {
    let device = FunctionDevice::model();
    let context = Arc::new(device.context());
    // SAFETY: the context is live, and nothing else uses it yet.
    let real = unsafe { (*context.as_raw()).ops.post_send.replace(queue_and_fail) };
    REAL.set(real.unwrap()).expect("one test uses it");
    let domain = Arc::new(ProtectionDomain::new(&context).unwrap());
    let side = || builder(&domain).flow_control(true);
    let (one, two) = connect(side(), side());
    let mut pair = Pair { one, two, domain, device };
    drop(context);
    let target = pair.shared(1);
    let region = pair.region(8, 1);
    // SAFETY: the region outlives what is in flight.
    let no_credit =
        unsafe { pair.one.post_unpolled(SendWorkRequest::new(region.slice(..).unwrap())) }
            .unwrap_err();
    assert_eq!(no_credit, TransportError::NoCredit);
    pair.device.progress(Progress::Manual);
    FAILS.set(true);
    // SAFETY: as above.
    let failed = unsafe {
        pair.one.post_unpolled(WriteWorkRequest::new(region.slice(..).unwrap(), target.remote()))
    }
    .unwrap_err();
    assert!(matches!(failed, TransportError::Verbs(_)), "{failed}");
    assert_eq!(outstanding(&pair.device, &pair.one), (0, 0), "the device still has it");
    is_stopped(&mut pair);
    drop((region, target));
    pair.finish();
}

#[test]
fn no_request_of_a_scope_is_left_with_the_device_though_posting_failed() {
    let mut pair = Pair::new();
    let (target, mut local) = (pair.shared(1), pair.region(16, 1));
    let remote = target.remote();
    let (first, second) = local.slice_mut(..).unwrap().split_at(8).unwrap();
    let (one, device) = (&mut pair.one, &pair.device);
    let number = one.number();
    device.progress(Progress::Manual);
    let result = one.scope(|s| {
        let before = s.post_read(first, remote)?;
        device.fail("ring_doorbell").errno(libc::EACCES).times(1);
        refused(s.post_read(second, remote));
        // The earlier request has ended too, and its handle returns the error.
        assert_eq!(device.outstanding(number), (0, 0), "the device still has it");
        before.wait().map(drop)
    });
    assert!(matches!(result, Err(ScopeError::Closure(TransportError::Work(_)))), "{result:?}");
    is_stopped(&mut pair);
    let mut pair = pair.reconnect();
    pair.device.progress(Progress::OnPoll);
    pair.exchange();
    drop((target, local));
    pair.finish();
}

#[test]
fn no_unpolled_request_is_left_with_the_device_though_posting_failed() {
    let mut pair = Pair::new();
    let post = |one: &mut Channel<'_>| -> Result<PendingWork, TransportError> {
        // SAFETY: there is no memory.
        unsafe { one.post_unpolled(SendWorkRequest::new(())) }
    };
    let before = post(&mut pair.one).unwrap();
    fail_once(&pair);
    refused(post(&mut pair.one));
    let ended = before.wait(&mut pair.one).unwrap_err();
    assert!(matches!(ended, TransportError::Work(_)), "{ended}");
    is_stopped(&mut pair);
    pair.reconnect().finish();
}

/// A buffer that the device only reads may be given back even then, so the program continues.
#[test]
fn a_send_that_cannot_be_taken_back_closes_the_channel_only() {
    let mut pair = Pair::new();
    fail_once(&pair);
    for verb in ["modify_qp", "destroy_qp"] {
        pair.device.fail(verb).errno(libc::EIO).always();
    }
    refused(pair.one.send(()));
    assert_eq!(pair.one.send(()).unwrap_err(), TransportError::Stopped);
    pair.device.clear_faults();
    pair.reconnect().finish();
}

#[test]
fn a_request_that_is_refused_leaves_the_channel_as_it_is() {
    let mut pair = Pair::new();
    pair.device.fail("post_send").errno(libc::EACCES).times(2);
    refused(pair.one.send(()));
    refused(pair.one.scope(|s| s.post_send(()).map(drop)).map_err(TransportError::from));
    pair.exchange();
    pair.finish();
}

/// Some devices take a length of 0 for 2 GiB.
#[test]
fn the_device_is_given_nothing_empty() {
    let mut pair = Pair::new();
    let (mut local, target) = (pair.region(12, 0), pair.shared(1));
    let remote = target.remote();
    let lengths = |pair: &Pair| {
        let posted = pair.device.posted(0).unwrap();
        posted.list.iter().map(|&(_, length, _)| length).collect::<Vec<_>>()
    };
    let nothing = &mut local.slice_mut(5..5).unwrap();
    pair.one.until(soon()).receive(nothing).unwrap_err();
    assert_eq!(lengths(&pair), []);
    let mut pair = pair.reconnect();
    pair.one.read(&mut local.slice_mut(12..).unwrap(), remote).unwrap();
    assert_eq!(lengths(&pair), []);
    pair.one.read(&mut local.slice_mut(..8).unwrap(), remote).unwrap();
    assert_eq!(lengths(&pair), [8]);
    // Elements without bytes are left out of writes, too: mthca would send 2 GiB.
    pair.one.write(local.slice(3..3).unwrap(), remote).unwrap();
    assert_eq!(lengths(&pair), []);
    pair.one.write([local.slice(3..3).unwrap(), local.slice(..2).unwrap()], remote).unwrap();
    assert_eq!(lengths(&pair), [2]);
    pair.one.write(local.slice(..8).unwrap(), remote).unwrap();
    assert_eq!(lengths(&pair), [8]);
    let (empty, rest) = local.slice_mut(..).unwrap().split_at(0).unwrap();
    let (head, tail) = rest.split_at(8).unwrap();
    let (none, tail) = tail.split_at(0).unwrap();
    pair.one.read(&mut (none, empty, head), remote).unwrap();
    assert_eq!(lengths(&pair), [8]);
    let (left, right) = tail.split_at(4).unwrap();
    pair.one.until(soon()).receive(&mut [left, right]).unwrap_err();
    assert_eq!(lengths(&pair), [4]);
    drop((local, target));
    pair.reconnect().finish();
}
