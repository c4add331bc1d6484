//! The verbs, as libibverbs calls them: each asks first whether it is to fail.

use std::ffi::{c_int, c_uint, c_void};
use std::ptr::null_mut;

use super::{
    address, completion, device_memory, extended_completion, memory, pd, post, query, queue_pair,
    set_errno, shared, shared_receive, xrc,
};
use crate::faults::{Verb, When};
use crate::ffi::*;

/// The object that a verb is called on.
trait Argument: Copy {
    /// # Safety
    ///
    /// It is a live object.
    unsafe fn context(self) -> *mut ibv_context;
}

macro_rules! arguments {
    ($($type:ty: $($field:ident).+;)*) => {
        $(impl Argument for *mut $type {
            unsafe fn context(self) -> *mut ibv_context {
                // SAFETY: the caller vouches for it.
                unsafe { (*self).$($field).+ }
            }
        })*
    };
}

arguments! {
    ibv_pd: context;
    verbs_mr: ibv_mr.context;
    ibv_dm: context;
    ibv_mw: context;
    ibv_td: context;
    ibv_cq: context;
    ibv_srq: context;
    ibv_qp: context;
    ibv_ah: context;
    ibv_xrcd: context;
}

impl Argument for *mut ibv_context {
    unsafe fn context(self) -> *mut ibv_context {
        self
    }
}

/// A verb's result: an object, or 0 or an errno.
trait Outcome {
    fn failure(errno: c_int) -> Self;
    fn is_success(&self) -> bool;

    /// Takes an object back that would use what its program frees when the verb fails: the memory of a region, the channel of a queue.
    ///
    /// # Safety
    ///
    /// The verb has just made it, in the context.
    unsafe fn take_back(self, verb: Verb, context: *mut ibv_context);
}

impl<T> Outcome for *mut T {
    fn failure(errno: c_int) -> Self {
        set_errno(errno);
        null_mut()
    }

    fn is_success(&self) -> bool {
        !self.is_null()
    }

    unsafe fn take_back(self, verb: Verb, context: *mut ibv_context) {
        // SAFETY: these verbs make such objects.
        unsafe {
            match verb {
                Verb::RegMr => {
                    memory::dereg_mr(self.cast());
                }
                Verb::CreateCq => {
                    // libibverbs sets it later.
                    (*self.cast::<ibv_cq>()).context = context;
                    completion::destroy_cq(self.cast());
                }
                _ => {}
            }
        }
    }
}

impl Outcome for c_int {
    fn failure(errno: c_int) -> Self {
        set_errno(errno);
        errno
    }

    fn is_success(&self) -> bool {
        *self == 0
    }

    unsafe fn take_back(self, _: Verb, _: *mut ibv_context) {}
}

/// Makes a function for each verb, of the same name.
macro_rules! verbs {
    ($($verb:ident: $module:ident::$name:ident($first:ident: $first_type:ty $(, $rest:ident: $type:ty)*)
        -> $result:ty;)*) => {
        $(pub(super) unsafe extern "C" fn $name($first: $first_type $(, $rest: $type)*) -> $result {
            // SAFETY: as the module's parent says. The context outlives the call, and so does its device.
            unsafe {
                let failure = shared($first.context()).failures().of(Verb::$verb);
                if let Some((errno, When::Before)) = failure {
                    return <$result>::failure(errno);
                }
                let result = $module::$name($first $(, $rest)*);
                match failure {
                    Some((errno, _)) if result.is_success() => {
                        result.take_back(Verb::$verb, $first.context());
                        <$result>::failure(errno)
                    }
                    _ => result,
                }
            }
        })*
    };
}

verbs! {
    QueryDevice: query::query_device_ex(
        context: *mut ibv_context, input: *const ibv_query_device_ex_input,
        attr: *mut ibv_device_attr_ex, size: usize) -> c_int;
    QueryPort: query::query_port(
        context: *mut ibv_context, port: u8, attr: *mut ibv_port_attr) -> c_int;
    QueryRtValues: query::query_rt_values(
        context: *mut ibv_context, values: *mut ibv_values_ex) -> c_int;
    AllocPd: pd::alloc_pd(context: *mut ibv_context) -> *mut ibv_pd;
    DeallocPd: pd::dealloc_pd(pd: *mut ibv_pd) -> c_int;
    AllocTd: pd::alloc_td(context: *mut ibv_context, attr: *mut ibv_td_init_attr) -> *mut ibv_td;
    DeallocTd: pd::dealloc_td(td: *mut ibv_td) -> c_int;
    AllocParentDomain: pd::alloc_parent_domain(
        context: *mut ibv_context, attr: *mut ibv_parent_domain_init_attr) -> *mut ibv_pd;
    OpenXrcd: xrc::open_xrcd(
        context: *mut ibv_context, attr: *mut ibv_xrcd_init_attr) -> *mut ibv_xrcd;
    CloseXrcd: xrc::close_xrcd(xrcd: *mut ibv_xrcd) -> c_int;
    RegMr: memory::reg_mr(
        pd: *mut ibv_pd, address: *mut c_void, length: usize, iova: u64, access: c_int) -> *mut ibv_mr;
    RegMr: memory::reg_dmabuf_mr(
        pd: *mut ibv_pd, offset: u64, length: usize, iova: u64, fd: c_int, access: c_int) -> *mut ibv_mr;
    ReregMr: memory::rereg_mr(
        mr: *mut verbs_mr, flags: c_int, pd: *mut ibv_pd, address: *mut c_void, length: usize,
        access: c_int) -> c_int;
    DeregMr: memory::dereg_mr(mr: *mut verbs_mr) -> c_int;
    AllocNullMr: memory::alloc_null_mr(pd: *mut ibv_pd) -> *mut ibv_mr;
    AllocDm: device_memory::alloc_dm(
        context: *mut ibv_context, attr: *mut ibv_alloc_dm_attr) -> *mut ibv_dm;
    FreeDm: device_memory::free_dm(dm: *mut ibv_dm) -> c_int;
    RegMr: device_memory::reg_dm_mr(
        pd: *mut ibv_pd, dm: *mut ibv_dm, offset: u64, length: usize, access: c_uint) -> *mut ibv_mr;
    AllocMw: memory::alloc_mw(pd: *mut ibv_pd, kind: ibv_mw_type) -> *mut ibv_mw;
    DeallocMw: memory::dealloc_mw(mw: *mut ibv_mw) -> c_int;
    BindMw: post::bind_mw(qp: *mut ibv_qp, mw: *mut ibv_mw, info: *mut ibv_mw_bind) -> c_int;
    CreateCq: completion::create_cq(
        context: *mut ibv_context, cqe: c_int, channel: *mut ibv_comp_channel, vector: c_int)
        -> *mut ibv_cq;
    CreateCq: extended_completion::create_cq_ex(
        context: *mut ibv_context, attr: *mut ibv_cq_init_attr_ex) -> *mut ibv_cq_ex;
    ModifyCq: completion::modify_cq(cq: *mut ibv_cq, attr: *mut ibv_modify_cq_attr) -> c_int;
    ResizeCq: completion::resize_cq(cq: *mut ibv_cq, cqe: c_int) -> c_int;
    DestroyCq: completion::destroy_cq(cq: *mut ibv_cq) -> c_int;
    ReqNotifyCq: completion::req_notify_cq(cq: *mut ibv_cq, solicited_only: c_int) -> c_int;
    CreateSrq: shared_receive::create_srq(
        pd: *mut ibv_pd, init: *mut ibv_srq_init_attr) -> *mut ibv_srq;
    CreateSrq: shared_receive::create_srq_ex(
        context: *mut ibv_context, init: *mut ibv_srq_init_attr_ex) -> *mut ibv_srq;
    ModifySrq: shared_receive::modify_srq(
        srq: *mut ibv_srq, attr: *mut ibv_srq_attr, mask: c_int) -> c_int;
    QuerySrq: shared_receive::query_srq(srq: *mut ibv_srq, attr: *mut ibv_srq_attr) -> c_int;
    GetSrqNum: shared_receive::get_srq_num(srq: *mut ibv_srq, number: *mut u32) -> c_int;
    DestroySrq: shared_receive::destroy_srq(srq: *mut ibv_srq) -> c_int;
    CreateQp: queue_pair::create_qp(pd: *mut ibv_pd, attr: *mut ibv_qp_init_attr) -> *mut ibv_qp;
    CreateQp: queue_pair::create_qp_ex(
        context: *mut ibv_context, attr: *mut ibv_qp_init_attr_ex) -> *mut ibv_qp;
    OpenQp: queue_pair::open_qp(
        context: *mut ibv_context, attr: *mut ibv_qp_open_attr) -> *mut ibv_qp;
    ModifyQp: queue_pair::modify_qp(
        qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int) -> c_int;
    QueryQp: queue_pair::query_qp(
        qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int, init: *mut ibv_qp_init_attr) -> c_int;
    DestroyQp: queue_pair::destroy_qp(qp: *mut ibv_qp) -> c_int;
    CreateAh: address::create_ah(pd: *mut ibv_pd, attr: *mut ibv_ah_attr) -> *mut ibv_ah;
    DestroyAh: address::destroy_ah(ah: *mut ibv_ah) -> c_int;
    AttachMcast: address::attach_mcast(qp: *mut ibv_qp, gid: *const ibv_gid, lid: u16) -> c_int;
    DetachMcast: address::detach_mcast(qp: *mut ibv_qp, gid: *const ibv_gid, lid: u16) -> c_int;
}

/// Makes a function for each verb that posts a list. One that fails names the first request as the bad one, even if
/// all of them were posted.
macro_rules! posts {
    ($($verb:ident: $module:ident::$name:ident($on:ty, $request:ty);)*) => {
        $(pub(super) unsafe extern "C" fn $name(
            on: *mut $on,
            list: *mut $request,
            bad: *mut *mut $request,
        ) -> c_int {
            // SAFETY: as the module's parent says.
            unsafe {
                let failure = shared(on.context()).failures().of(Verb::$verb);
                if let Some((errno, When::Before)) = failure {
                    *bad = list;
                    return c_int::failure(errno);
                }
                let result = $module::$name(on, list, bad);
                match failure {
                    Some((errno, _)) if result.is_success() => {
                        *bad = list;
                        c_int::failure(errno)
                    }
                    _ => result,
                }
            }
        })*
    };
}

posts! {
    PostSend: post::post_send(ibv_qp, ibv_send_wr);
    PostRecv: post::post_recv(ibv_qp, ibv_recv_wr);
    PostSrqRecv: shared_receive::post_srq_recv(ibv_srq, ibv_recv_wr);
}

/// Returns the number of completions, or a negative errno.
pub(super) unsafe extern "C" fn poll_cq(cq: *mut ibv_cq, most: c_int, to: *mut ibv_wc) -> c_int {
    // SAFETY: as the module's parent says.
    unsafe {
        let failure = shared((*cq).context).failures().of(Verb::PollCq);
        if let Some((errno, When::Before)) = failure {
            return -c_int::failure(errno);
        }
        let count = completion::poll_cq(cq, most, to);
        match failure {
            Some((errno, _)) => -c_int::failure(errno),
            None => count,
        }
    }
}
