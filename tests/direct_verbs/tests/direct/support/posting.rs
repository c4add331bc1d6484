//! The functions of `struct ibv_qp_ex`: recorded, and those for sends carried out by the device too.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::{c_int, c_void};

use ibverbs::ffi::*;

use super::post;

thread_local! {
    /// The device's own functions.
    static OWN: RefCell<HashMap<usize, ibv_qp_ex>> = RefCell::new(HashMap::new());
    /// Whether the device has the request that setters apply to.
    static SENDS: RefCell<bool> = const { RefCell::new(false) };
}

/// Replaces the functions of a queue pair: those for `operations` by recording ones, all others by null.
///
/// # Safety
///
/// `qp` is live, and was created for the extended interface.
pub(crate) unsafe fn record_posting(qp: *mut ibv_qp, operations: u64) {
    use ibv_qp_create_send_ops_flags as op;

    // SAFETY: the caller vouches for the queue pair.
    let ex = unsafe { &mut *ibv_qp_to_qp_ex(qp) };
    OWN.with_borrow_mut(|own| own.insert(std::ptr::from_mut(ex) as usize, *ex));
    let has = |bit: op| operations & u64::from(bit.0) != 0;
    ex.wr_start = Some(start);
    ex.wr_complete = Some(complete);
    ex.wr_abort = Some(abort);
    ex.wr_send = has(op::IBV_QP_EX_WITH_SEND).then_some(send as _);
    ex.wr_send_imm = has(op::IBV_QP_EX_WITH_SEND_WITH_IMM).then_some(send_imm as _);
    ex.wr_rdma_write = has(op::IBV_QP_EX_WITH_RDMA_WRITE).then_some(write as _);
    ex.wr_rdma_write_imm = has(op::IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM).then_some(write_imm as _);
    ex.wr_rdma_read = has(op::IBV_QP_EX_WITH_RDMA_READ).then_some(read as _);
    ex.wr_atomic_cmp_swp = has(op::IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP).then_some(cmp_swp as _);
    ex.wr_atomic_fetch_add = has(op::IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD).then_some(fetch_add as _);
    ex.wr_send_inv = None;
    ex.wr_local_inv = None;
    ex.wr_bind_mw = None;
    ex.wr_atomic_write = None;
    ex.wr_flush = None;
    ex.wr_send_tso = None;
    ex.wr_set_ud_addr = Some(set_ud_addr);
    ex.wr_set_xrc_srqn = None;
    ex.wr_set_sge = Some(set_sge);
    ex.wr_set_sge_list = Some(set_sge_list);
    ex.wr_set_inline_data = Some(set_inline_data);
    ex.wr_set_inline_data_list = None;
}

fn own(ex: *mut ibv_qp_ex) -> ibv_qp_ex {
    OWN.with_borrow(|own| own[&(ex as usize)])
}

fn sends() -> bool {
    SENDS.with_borrow(|sends| *sends)
}

/// Records the beginning of a request, whose number and flags are in the queue pair.
fn begin(ex: *mut ibv_qp_ex, name: &'static str, arguments: &[u64], sends: bool) {
    SENDS.set(sends);
    // SAFETY: the caller of the function gives a live queue pair.
    let mut all = unsafe { vec![(*ex).wr_id, (*ex).wr_flags.into()] };
    all.extend(arguments);
    post(name, &all);
}

macro_rules! recorded {
    ($($name:ident($($argument:ident: $type:ty),*) |$ex:ident| $body:block)+) => {$(
        unsafe extern "C" fn $name($ex: *mut ibv_qp_ex, $($argument: $type),*) $body
    )+};
}

// The crate calls each of these for the queue pair whose functions were replaced, and the device's own
// functions take the same arguments.
recorded! {
    start() |ex| {
        post("wr_start", &[]);
        // SAFETY: as said above.
        unsafe { own(ex).wr_start.unwrap()(ex) }
    }
    abort() |ex| {
        post("wr_abort", &[]);
        // SAFETY: as said above.
        unsafe { own(ex).wr_abort.unwrap()(ex) }
    }
    send() |ex| {
        begin(ex, "wr_send", &[], true);
        // SAFETY: as said above.
        unsafe { own(ex).wr_send.unwrap()(ex) }
    }
    send_imm(immediate: __be32) |ex| {
        begin(ex, "wr_send_imm", &[immediate.into()], true);
        // SAFETY: as said above.
        unsafe { own(ex).wr_send_imm.unwrap()(ex, immediate) }
    }
    write(rkey: u32, address: u64) |ex| {
        begin(ex, "wr_rdma_write", &[rkey.into(), address], false);
    }
    write_imm(rkey: u32, address: u64, immediate: __be32) |ex| {
        begin(ex, "wr_rdma_write_imm", &[rkey.into(), address, immediate.into()], false);
    }
    read(rkey: u32, address: u64) |ex| {
        begin(ex, "wr_rdma_read", &[rkey.into(), address], false);
    }
    cmp_swp(rkey: u32, address: u64, compare: u64, swap: u64) |ex| {
        begin(ex, "wr_atomic_cmp_swp", &[rkey.into(), address, compare, swap], false);
    }
    fetch_add(rkey: u32, address: u64, add: u64) |ex| {
        begin(ex, "wr_atomic_fetch_add", &[rkey.into(), address, add], false);
    }
    set_ud_addr(ah: *mut ibv_ah, number: u32, qkey: u32) |ex| {
        post("wr_set_ud_addr", &[ah as u64, number.into(), qkey.into()]);
        if sends() {
            // SAFETY: as said above.
            unsafe { own(ex).wr_set_ud_addr.unwrap()(ex, ah, number, qkey) }
        }
    }
    set_sge(lkey: u32, address: u64, length: u32) |ex| {
        post("wr_set_sge", &[lkey.into(), address, length.into()]);
        if sends() {
            // SAFETY: as said above.
            unsafe { own(ex).wr_set_sge.unwrap()(ex, lkey, address, length) }
        }
    }
    set_sge_list(count: usize, list: *const ibv_sge) |ex| {
        post("wr_set_sge_list", &[count as u64]);
        if sends() {
            // SAFETY: as said above.
            unsafe { own(ex).wr_set_sge_list.unwrap()(ex, count, list) }
        }
    }
    set_inline_data(bytes: *mut c_void, length: usize) |ex| {
        post("wr_set_inline_data", &[length as u64]);
        if sends() {
            // SAFETY: as said above.
            unsafe { own(ex).wr_set_inline_data.unwrap()(ex, bytes, length) }
        }
    }
}

unsafe extern "C" fn complete(ex: *mut ibv_qp_ex) -> c_int {
    post("wr_complete", &[]);
    // SAFETY: as above.
    unsafe { own(ex).wr_complete.unwrap()(ex) }
}
