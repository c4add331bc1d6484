//! Verbs that fail.

use std::collections::VecDeque;
use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

/// A verb that can fail: see [`Device::fail`](crate::Device::fail).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Verb {
    /// `ibv_open_device`.
    OpenDevice,
    /// `ibv_query_device_ex`, and so `ibv_query_device`.
    QueryDevice,
    /// `ibv_query_port`.
    QueryPort,
    /// `ibv_query_gid`, `ibv_query_gid_ex`, `ibv_query_gid_table`.
    QueryGid,
    /// `ibv_query_rt_values_ex`.
    QueryRtValues,
    /// `ibv_alloc_pd`.
    AllocPd,
    /// `ibv_alloc_parent_domain`.
    AllocParentDomain,
    /// `ibv_dealloc_pd`, also of a parent domain.
    DeallocPd,
    /// `ibv_alloc_td`.
    AllocTd,
    /// `ibv_dealloc_td`.
    DeallocTd,
    /// `ibv_open_xrcd`.
    OpenXrcd,
    /// `ibv_close_xrcd`.
    CloseXrcd,
    /// `ibv_reg_mr`, `ibv_reg_mr_iova`, `ibv_reg_mr_iova2`, `ibv_reg_dm_mr`, `ibv_reg_dmabuf_mr`.
    RegMr,
    /// `ibv_alloc_null_mr`.
    AllocNullMr,
    /// `ibv_rereg_mr`.
    ReregMr,
    /// `ibv_dereg_mr`.
    DeregMr,
    /// `ibv_alloc_dm`.
    AllocDm,
    /// `ibv_free_dm`.
    FreeDm,
    /// `ibv_alloc_mw`.
    AllocMw,
    /// `ibv_dealloc_mw`.
    DeallocMw,
    /// `ibv_bind_mw`.
    BindMw,
    /// `ibv_create_comp_channel`.
    CreateCompChannel,
    /// `ibv_create_cq`, `ibv_create_cq_ex`.
    CreateCq,
    /// `ibv_modify_cq`.
    ModifyCq,
    /// `ibv_resize_cq`.
    ResizeCq,
    /// `ibv_destroy_cq`.
    DestroyCq,
    /// `ibv_poll_cq`, which returns the negative errno; `ibv_start_poll`, `ibv_next_poll`. After it took
    /// effect: the completions are lost.
    PollCq,
    /// `ibv_req_notify_cq`.
    ReqNotifyCq,
    /// `ibv_create_srq`, `ibv_create_srq_ex`.
    CreateSrq,
    /// `ibv_modify_srq`.
    ModifySrq,
    /// `ibv_query_srq`.
    QuerySrq,
    /// `ibv_get_srq_num`.
    GetSrqNum,
    /// `ibv_destroy_srq`.
    DestroySrq,
    /// `ibv_post_srq_recv`.
    PostSrqRecv,
    /// `ibv_create_qp`, `ibv_create_qp_ex`.
    CreateQp,
    /// `ibv_open_qp`.
    OpenQp,
    /// `ibv_modify_qp`.
    ModifyQp,
    /// `ibv_query_qp`.
    QueryQp,
    /// `ibv_destroy_qp`.
    DestroyQp,
    /// `ibv_post_send`, `ibv_wr_complete`.
    PostSend,
    /// `ibv_post_recv`.
    PostRecv,
    /// `ibv_create_ah`.
    CreateAh,
    /// `ibv_destroy_ah`.
    DestroyAh,
    /// `ibv_attach_mcast`.
    AttachMcast,
    /// `ibv_detach_mcast`.
    DetachMcast,
}

/// When a verb fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum When {
    /// Before it had any effect.
    Before,
    /// After it has taken effect: the device has posted the request, or destroyed the object. It keeps an object that it has
    /// created, which the program cannot destroy, except a region or a completion queue: the program frees the memory of the
    /// one, and closes the file of the other.
    After,
}

#[derive(Clone, Copy, Debug)]
struct Failure {
    verb: Verb,
    /// `None`: the call goes through.
    outcome: Option<(c_int, When)>,
    left: u32,
}

/// How many verbs there are.
const VERBS: usize = Verb::DetachMcast as usize + 1;

/// The failures that are still to come.
#[derive(Debug, Default)]
pub(crate) struct Failures {
    /// Whether there is anything below: all that a verb reads otherwise.
    any: AtomicBool,
    list: Mutex<VecDeque<Failure>>,
    /// The device is removed: verbs that hardware's drivers send to the kernel fail.
    removed: AtomicBool,
    /// How often each verb was called, once that is counted.
    calls: OnceLock<[AtomicU64; VERBS]>,
}

impl Failures {
    fn list(&self) -> MutexGuard<'_, VecDeque<Failure>> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn add(&self, verb: Verb, errno: c_int, when: When, count: u32) {
        // Zero would be the success of what was not done, and a negative one that of a poll.
        let errno = if errno > 0 { errno } else { libc::EIO };
        self.push(verb, Some((errno, when)), count);
    }

    pub(crate) fn let_pass(&self, verb: Verb, count: u32) {
        self.push(verb, None, count);
    }

    fn push(&self, verb: Verb, outcome: Option<(c_int, When)>, count: u32) {
        let mut list = self.list();
        if count > 0 {
            list.push_back(Failure { verb, outcome, left: count });
            self.any.store(true, Ordering::Release);
        }
    }

    pub(crate) fn clear(&self) {
        let mut list = self.list();
        list.clear();
        self.forget_list();
    }

    /// The list, whose lock the caller holds, is empty.
    fn forget_list(&self) {
        self.any.store(self.is_removed() || self.calls.get().is_some(), Ordering::Release);
    }

    pub(crate) fn observe(&self) {
        let _list = self.list();
        self.calls.get_or_init(|| [const { AtomicU64::new(0) }; VERBS]);
        self.any.store(true, Ordering::Release);
    }

    pub(crate) fn calls(&self, verb: Verb) -> u64 {
        self.calls.get().map_or(0, |calls| calls[verb as usize].load(Ordering::Relaxed))
    }

    pub(crate) fn remove_device(&self) {
        self.removed.store(true, Ordering::Release);
        self.any.store(true, Ordering::Release);
    }

    pub(crate) fn is_removed(&self) -> bool {
        self.removed.load(Ordering::Acquire)
    }

    /// Whether this call of a verb fails, how, and when.
    #[inline]
    pub(crate) fn of(&self, verb: Verb) -> Option<(c_int, When)> {
        if self.any.load(Ordering::Acquire) { self.take(verb) } else { None }
    }

    #[cold]
    fn take(&self, verb: Verb) -> Option<(c_int, When)> {
        if let Some(calls) = self.calls.get() {
            calls[verb as usize].fetch_add(1, Ordering::Relaxed);
        }
        // A poll reads memory of the program only: it returns what had completed.
        if self.is_removed() && verb != Verb::PollCq {
            return Some((libc::EIO, When::Before));
        }
        let mut list = self.list();
        let index = list.iter().position(|failure| failure.verb == verb)?;
        let failure = &mut list[index];
        failure.left -= 1;
        let Failure { outcome, left, .. } = *failure;
        if left == 0 {
            list.remove(index);
        }
        if list.is_empty() {
            self.forget_list();
        }
        outcome
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_come_in_order_and_as_often_as_asked_for() {
        let failures = Failures::default();
        failures.add(Verb::RegMr, 5, When::Before, 2);
        failures.add(Verb::RegMr, 6, When::After, 1);
        failures.add(Verb::AllocPd, 7, When::Before, 0);
        assert_eq!(failures.of(Verb::AllocPd), None);
        let taken: Vec<_> = std::iter::from_fn(|| failures.of(Verb::RegMr)).collect();
        assert_eq!(taken, [(5, When::Before), (5, When::Before), (6, When::After)]);
        assert!(!failures.any.load(Ordering::Relaxed));
        failures.add(Verb::PollCq, 1, When::Before, 1);
        failures.remove_device();
        failures.clear();
        assert_eq!(failures.of(Verb::RegMr), Some((libc::EIO, When::Before)));
        assert_eq!(failures.of(Verb::PollCq), None);
    }
}
