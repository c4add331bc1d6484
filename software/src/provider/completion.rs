//! Completion queues.

use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Instant;

use super::context::is_ours;
use super::{context, object, shared, status, wait_acknowledged, zeroed};
use crate::driver::Shared;
use crate::ffi::*;
use crate::transport::events;
use crate::transport::queues::CompletionQueue;
use crate::transport::work::Completion;

/// `struct verbs_cq`, and the completion that a poll is at.
#[repr(C)]
pub(super) struct SoftCq {
    verbs: verbs_cq,
    /// Held from `start_poll` to `end_poll`: one thread polls at a time.
    pub(super) polling: pthread_mutex_t,
    pub(super) current: Option<Completion>,
    /// The number of ready completions: an empty poll takes no lock.
    depth: Arc<AtomicUsize>,
    /// A thread that waits for its events receives packets itself; a loop of the program waits for `wake_fd`.
    pub(super) is_attended: AtomicBool,
    is_attached: AtomicBool,
    /// Tells it from all others of this process, also from later ones with its number.
    serial: u64,
}

impl SoftCq {
    fn new() -> Box<Self> {
        static SERIAL: AtomicU64 = AtomicU64::new(0);
        Box::new(Self {
            verbs: *zeroed::<verbs_cq>(),
            polling: *zeroed::<pthread_mutex_t>(),
            current: None,
            depth: Arc::default(),
            is_attended: AtomicBool::new(false),
            is_attached: AtomicBool::new(false),
            serial: SERIAL.fetch_add(1, Ordering::Relaxed),
        })
    }

    /// Receives packets if there is nothing to poll; returns whether the queue, of this number, is still empty.
    pub(super) fn is_idle(&self, shared: &Shared, number: u32) -> bool {
        if self.depth.load(Ordering::Acquire) == 0 {
            shared.make_progress(number);
        }
        self.depth.load(Ordering::Acquire) == 0
    }
}

pub(super) unsafe extern "C" fn create_cq(
    context: *mut ibv_context,
    cqe: c_int,
    channel: *mut ibv_comp_channel,
    vector: c_int,
) -> *mut ibv_cq {
    // SAFETY: as the module says.
    unsafe { create(context, u32::try_from(cqe).unwrap_or(0), channel, vector, false) }.cast()
}

/// `is_timed`: the program can ask when something completed.
///
/// # Safety
///
/// As the module says.
pub(super) unsafe fn create(
    context: *mut ibv_context,
    cqe: u32,
    channel: *mut ibv_comp_channel,
    vector: c_int,
    is_timed: bool,
) -> *mut SoftCq {
    // SAFETY: as the module says.
    let made = unsafe {
        let is_foreign = channel.as_ref().is_some_and(|channel| channel.context != context);
        if is_foreign || !(0..(*context).num_comp_vectors).contains(&vector) {
            Err(libc::EINVAL)
        } else {
            let cq = Box::into_raw(SoftCq::new());
            let channel = channel.as_ref().map(|channel| channel.fd);
            let mut queue = CompletionQueue::new(cq as u64, context::number(context), cqe, channel);
            queue.is_timed = is_timed;
            (*cq).depth = queue.depth.clone();
            let number = shared(context).lock().create_cq(queue);
            match number {
                Ok(number) => {
                    let plain = cq.cast::<ibv_cq>();
                    (*plain).handle = number;
                    (*plain).cqe = cqe as c_int;
                    Ok(cq)
                }
                Err(errno) => {
                    drop(Box::from_raw(cq));
                    Err(errno)
                }
            }
        }
    };
    object(made)
}

pub(super) unsafe extern "C" fn destroy_cq(cq: *mut ibv_cq) -> c_int {
    // SAFETY: as the module says; it is ours, and freed once.
    unsafe {
        let read = match shared((*cq).context).lock().destroy_cq((*cq).handle) {
            Ok(read) => read,
            Err(errno) => return status(Err(errno)),
        };
        wait_acknowledged(&raw mut (*cq).mutex, &raw mut (*cq).cond, || {
            (&raw const (*cq).comp_events_completed).read_volatile() == read.completion
                && (&raw const (*cq).async_events_completed).read_volatile() == read.asynchronous
        });
        shared((*cq).context).driver().detach(&(*cq.cast::<SoftCq>()).is_attached, None);
        drop(Box::from_raw(cq.cast::<SoftCq>()));
    }
    0
}

pub(super) unsafe extern "C" fn resize_cq(cq: *mut ibv_cq, cqe: c_int) -> c_int {
    // SAFETY: as the module says.
    unsafe {
        let capacity = u32::try_from(cqe).unwrap_or(0);
        let result = shared((*cq).context).lock().resize_cq((*cq).handle, capacity);
        if result.is_ok() {
            (*cq).cqe = cqe;
        }
        status(result)
    }
}

pub(super) unsafe extern "C" fn modify_cq(cq: *mut ibv_cq, attr: *mut ibv_modify_cq_attr) -> c_int {
    // SAFETY: as the module says.
    unsafe {
        if (*attr).attr_mask & !ibv_cq_attr_mask::IBV_CQ_ATTR_MODERATE.0 != 0 {
            return status(Err(libc::EOPNOTSUPP));
        }
        let moderate = &(*attr).moderate;
        let mut engine = shared((*cq).context).lock();
        if let Some(queue) = engine.core.cqs.get_mut((*cq).handle) {
            // The period is in microseconds.
            queue.moderation = (moderate.cq_count.into(), u64::from(moderate.cq_period) * 1_000);
        }
    }
    0
}

pub(super) unsafe extern "C" fn req_notify_cq(cq: *mut ibv_cq, solicited_only: c_int) -> c_int {
    // SAFETY: as the module says.
    unsafe {
        let shared = shared((*cq).context);
        let mut engine = shared.lock();
        shared.driver().before_sleep();
        engine.release_answers();
        status(engine.arm((*cq).handle, solicited_only != 0))
    }
}

pub(super) unsafe extern "C" fn poll_cq(cq: *mut ibv_cq, most: c_int, to: *mut ibv_wc) -> c_int {
    // SAFETY: as the module says; there is room for `most` completions.
    unsafe {
        let shared = shared((*cq).context);
        if (*cq.cast::<SoftCq>()).is_idle(shared, (*cq).handle) {
            return 0;
        }
        let mut engine = shared.lock();
        let mut count = 0;
        while count < most {
            let Some(completion) = engine.poll((*cq).handle) else { break };
            to.add(count as usize).write(translate(&completion));
            count += 1;
        }
        engine.polled((*cq).handle);
        count
    }
}

/// The device of a completion queue, if it is one of this process and has a thread.
///
/// # Safety
///
/// The queue is live, of whichever provider.
unsafe fn threaded<'a>(cq: *mut ibv_cq) -> Option<&'a Shared> {
    // SAFETY: the caller vouches for the queue, which holds its context.
    let shared = unsafe { is_ours((*cq).context).then(|| shared((*cq).context)) }?;
    (shared.is_unforked() && shared.driver().membership().is_none()).then_some(shared)
}

/// # Safety
///
/// As [`Hooks`](ibverbs::provider::Hooks) says.
pub(crate) unsafe fn sleep_for(
    cq: *mut ibv_cq,
    files: &[c_int],
    deadline: Option<Instant>,
) -> bool {
    // SAFETY: the caller vouches for the queue.
    unsafe {
        let Some(shared) = threaded(cq) else { return false };
        let soft = cq.cast::<SoftCq>();
        (*soft).is_attended.store(true, Ordering::Relaxed);
        shared.driver().sleep_for(shared, ((*cq).handle, (*soft).serial), files, deadline)
    }
}

/// # Safety
///
/// As [`Hooks`](ibverbs::provider::Hooks) says.
pub(crate) unsafe fn attend(cq: *mut ibv_cq) -> Option<c_int> {
    // SAFETY: the caller vouches for the queue.
    unsafe {
        let shared = threaded(cq)?;
        let soft = cq.cast::<SoftCq>();
        let wake_fd = shared.driver().attach(&(*soft).is_attached)?;
        (*soft).is_attended.store(true, Ordering::Relaxed);
        shared.lock().attend((*cq).handle);
        Some(wake_fd)
    }
}

/// # Safety
///
/// As [`Hooks`](ibverbs::provider::Hooks) says.
pub(crate) unsafe fn rest(cq: *mut ibv_cq) -> bool {
    // SAFETY: the caller vouches for the queue. The program counts the events that it has read there.
    unsafe {
        let Some(shared) = threaded(cq) else { return true };
        shared.driver().rest(shared, (*cq).handle);
        let read = (&raw const (*cq).comp_events_completed).read_volatile();
        shared.lock().events((*cq).handle) != read || events::is_any_ended()
    }
}

/// # Safety
///
/// As [`Hooks`](ibverbs::provider::Hooks) says.
pub(crate) unsafe fn detach(cq: *mut ibv_cq, set: c_int) {
    // SAFETY: the caller vouches for the queue.
    unsafe {
        let Some(shared) = threaded(cq) else { return };
        if shared.driver().detach(&(*cq.cast::<SoftCq>()).is_attached, Some(set)) {
            shared.lock().unattend((*cq).handle);
        }
    }
}

/// Whether a file of events is that of a device that was removed.
pub(crate) fn is_ended(file: c_int) -> bool {
    events::is_any_ended() && events::is_ended(file)
}

fn translate(completion: &Completion) -> ibv_wc {
    let mut wc = ibv_wc {
        wr_id: completion.id,
        status: completion.status,
        opcode: completion.opcode,
        vendor_err: 0,
        byte_len: completion.length,
        qp_num: completion.qpn,
        src_qp: completion.source,
        wc_flags: completion.flags,
        slid: completion.address_handle,
        sl: completion.service_level,
        ..Default::default()
    };
    wc.__bindgen_anon_1.imm_data = completion.immediate;
    wc
}
