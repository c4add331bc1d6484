//! Posting field by field: `ibv_wr_start` to `ibv_wr_complete`.
//!
//! A batch is built without the engine's lock, and posted as a whole or not at all.

use std::ffi::c_int;

use super::translate::{Rules, bind_request, gather_inline, list};
use super::{address, shared, status};
use crate::faults::{Verb, When};
use crate::ffi::*;
use crate::transport::work::{Data, Extra, Operation, SendRequest};
use crate::wire::header::{Feth, Reth};

/// The requests since `wr_start`, and the first error among them.
#[derive(Debug, Default)]
pub(super) struct Batch {
    requests: Vec<SendRequest>,
    error: Option<c_int>,
}

/// `struct verbs_qp`, and the batch that is being built.
#[repr(C)]
pub(super) struct SoftQp {
    pub(super) verbs: verbs_qp,
    /// Held from `wr_start` to `wr_complete`.
    pub(super) batching: pthread_mutex_t,
    #[cfg(feature = "mlx5")]
    pub(super) direct: mlx5dv_qp_ex,
    pub(super) batch: Batch,
    pub(super) max_inline: usize,
}

/// Sets the functions of an extended queue pair; `operations` are `enum ibv_qp_create_send_ops_flags`.
///
/// # Safety
///
/// `qp` is being made.
pub(super) unsafe fn set_functions(qp: *mut ibv_qp_ex, operations: u64) {
    type F = ibv_qp_create_send_ops_flags;
    let has = |flag: F| operations & u64::from(flag.0) != 0;
    // SAFETY: the caller vouches for it.
    let qp = unsafe { &mut *qp };
    qp.wr_start = Some(wr_start);
    qp.wr_complete = Some(wr_complete);
    qp.wr_abort = Some(wr_abort);
    qp.wr_set_sge = Some(wr_set_sge);
    qp.wr_set_sge_list = Some(wr_set_sge_list);
    qp.wr_set_inline_data = Some(wr_set_inline_data);
    qp.wr_set_inline_data_list = Some(wr_set_inline_data_list);
    qp.wr_set_ud_addr = Some(wr_set_ud_addr);
    qp.wr_set_xrc_srqn = Some(wr_set_xrc_srqn);
    qp.wr_send = has(F::IBV_QP_EX_WITH_SEND).then_some(wr_send);
    qp.wr_send_imm = has(F::IBV_QP_EX_WITH_SEND_WITH_IMM).then_some(wr_send_imm);
    qp.wr_send_inv = has(F::IBV_QP_EX_WITH_SEND_WITH_INV).then_some(wr_send_inv);
    qp.wr_rdma_write = has(F::IBV_QP_EX_WITH_RDMA_WRITE).then_some(wr_rdma_write);
    qp.wr_rdma_write_imm = has(F::IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM).then_some(wr_rdma_write_imm);
    qp.wr_rdma_read = has(F::IBV_QP_EX_WITH_RDMA_READ).then_some(wr_rdma_read);
    qp.wr_atomic_cmp_swp = has(F::IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP).then_some(wr_atomic_cmp_swp);
    qp.wr_atomic_fetch_add =
        has(F::IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD).then_some(wr_atomic_fetch_add);
    qp.wr_atomic_write = has(F::IBV_QP_EX_WITH_ATOMIC_WRITE).then_some(wr_atomic_write);
    qp.wr_flush = has(F::IBV_QP_EX_WITH_FLUSH).then_some(wr_flush);
    qp.wr_bind_mw = has(F::IBV_QP_EX_WITH_BIND_MW).then_some(wr_bind_mw);
    qp.wr_local_inv = has(F::IBV_QP_EX_WITH_LOCAL_INV).then_some(wr_local_inv);
}

/// # Safety
///
/// As the module says; the calling thread is between `wr_start` and `wr_complete`.
unsafe fn batch<'a>(qp: *mut ibv_qp_ex) -> &'a mut Batch {
    // SAFETY: as the caller says: `wr_start` has locked it.
    unsafe { &mut (*qp.cast::<SoftQp>()).batch }
}

unsafe extern "C" fn wr_start(qp: *mut ibv_qp_ex) {
    // SAFETY: as the module says.
    unsafe {
        libc::pthread_mutex_lock((&raw mut (*qp.cast::<SoftQp>()).batching).cast());
        *batch(qp) = Batch::default();
    }
}

unsafe extern "C" fn wr_abort(qp: *mut ibv_qp_ex) {
    // SAFETY: as the module says; `wr_start` has locked it.
    unsafe {
        *batch(qp) = Batch::default();
        libc::pthread_mutex_unlock((&raw mut (*qp.cast::<SoftQp>()).batching).cast());
    }
}

unsafe extern "C" fn wr_complete(qp: *mut ibv_qp_ex) -> c_int {
    // SAFETY: as the module says; `wr_start` has locked it.
    unsafe {
        let batch = std::mem::take(batch(qp));
        let failure = shared((*qp.cast::<ibv_qp>()).context).failures().of(Verb::PostSend);
        let result = match failure {
            None => post(qp, batch),
            Some((errno, When::Before)) => Err(errno),
            Some((errno, When::After)) => post(qp, batch).and(Err(errno)),
        };
        libc::pthread_mutex_unlock((&raw mut (*qp.cast::<SoftQp>()).batching).cast());
        status(result)
    }
}

/// # Safety
///
/// As the module says.
unsafe fn post(qp: *mut ibv_qp_ex, batch: Batch) -> Result<(), c_int> {
    if let Some(errno) = batch.error {
        return Err(errno);
    }
    // SAFETY: as the caller says.
    let (shared, number) = unsafe {
        let plain = qp.cast::<ibv_qp>();
        (shared((*plain).context), (*plain).handle)
    };
    let mut engine = shared.lock();
    let rules = Rules::of(engine.check_sends(number, batch.requests.len())?);
    let mut requests = batch.requests;
    for request in &mut requests {
        rules.check(request)?;
    }
    for request in requests {
        engine.post_send(number, request)?;
    }
    engine.kick(number);
    Ok(())
}

/// Begins a request.
///
/// # Safety
///
/// As the module says; a batch is open.
unsafe fn push(qp: *mut ibv_qp_ex, operation: Operation, extra: Extra) {
    // SAFETY: as the caller says.
    unsafe {
        let flags = (*qp).wr_flags;
        let has = |flag: ibv_send_flags| flags & flag.0 != 0;
        batch(qp).requests.push(SendRequest {
            id: (*qp).wr_id,
            operation,
            extra,
            data: Data::List(Vec::new()),
            length: 0,
            signaled: has(ibv_send_flags::IBV_SEND_SIGNALED),
            solicited: has(ibv_send_flags::IBV_SEND_SOLICITED),
            fence: has(ibv_send_flags::IBV_SEND_FENCE),
            destination: None,
            remote_srq: None,
        });
    }
}

/// Changes the request that was begun last.
///
/// # Safety
///
/// As the module says; a batch is open.
pub(super) unsafe fn last(
    qp: *mut ibv_qp_ex,
    change: impl FnOnce(&mut SendRequest) -> Result<(), c_int>,
) {
    // SAFETY: as the caller says.
    let batch = unsafe { batch(qp) };
    let changed = batch.requests.last_mut().ok_or(libc::EINVAL).and_then(change);
    if let Err(errno) = changed {
        batch.error.get_or_insert(errno);
    }
}

macro_rules! begin_functions {
    ($($name:ident($($argument:ident: $type:ty),*) $operation:expr, $extra:expr;)*) => {
        $(unsafe extern "C" fn $name(qp: *mut ibv_qp_ex, $($argument: $type),*) {
            // SAFETY: as the module says; a batch is open.
            unsafe { push(qp, $operation, $extra) };
        })*
    };
}

begin_functions! {
    wr_send() Operation::Send, Extra::None;
    wr_send_imm(data: __be32) Operation::Send, Extra::Immediate(data);
    wr_send_inv(rkey: u32) Operation::Send, Extra::Invalidate(rkey);
    wr_rdma_write(rkey: u32, address: u64) Operation::Write { address, rkey }, Extra::None;
    wr_rdma_write_imm(rkey: u32, address: u64, data: __be32)
        Operation::Write { address, rkey }, Extra::Immediate(data);
    wr_rdma_read(rkey: u32, address: u64) Operation::Read { address, rkey }, Extra::None;
    wr_atomic_cmp_swp(rkey: u32, address: u64, compare: u64, swap: u64)
        Operation::CompareSwap { address, rkey, compare, swap }, Extra::None;
    wr_atomic_fetch_add(rkey: u32, address: u64, add: u64)
        Operation::FetchAdd { address, rkey, add }, Extra::None;
    wr_local_inv(rkey: u32) Operation::Invalidate { rkey }, Extra::None;
}

/// The value is copied now.
unsafe extern "C" fn wr_atomic_write(
    qp: *mut ibv_qp_ex,
    rkey: u32,
    address: u64,
    value: *const std::ffi::c_void,
) {
    // SAFETY: as the module says; a batch is open, and the value has 8 bytes.
    unsafe {
        push(qp, Operation::AtomicWrite { address, rkey }, Extra::None);
        let value = value.cast::<[u8; 8]>().read_unaligned();
        last(qp, |request| {
            request.data = Data::Inline(value.to_vec());
            Ok(())
        });
    }
}

unsafe extern "C" fn wr_flush(
    qp: *mut ibv_qp_ex,
    rkey: u32,
    address: u64,
    length: usize,
    placement: u8,
    level: u8,
) {
    let whole_region = level == ibv_selectivity_level::IBV_FLUSH_MR.0 as u8;
    let feth = Feth { placement: placement.into(), whole_region };
    // The length of a range that is too long does not fit into the packet.
    let length = u32::try_from(length);
    let reth = Reth { address, rkey, length: length.unwrap_or(0) };
    // SAFETY: as the module says; a batch is open.
    unsafe {
        push(qp, Operation::Flush { feth, reth }, Extra::None);
        if length.is_err() && !whole_region {
            batch(qp).error.get_or_insert(libc::EINVAL);
        }
    }
}

unsafe extern "C" fn wr_bind_mw(
    qp: *mut ibv_qp_ex,
    mw: *mut ibv_mw,
    rkey: u32,
    info: *const ibv_mw_bind_info,
) {
    // SAFETY: as the module says; a batch is open.
    unsafe {
        match bind_request(mw, rkey, &*info) {
            Ok(bind) => push(qp, Operation::Bind(bind), Extra::None),
            Err(errno) => {
                batch(qp).error.get_or_insert(errno);
            }
        }
    }
}

unsafe extern "C" fn wr_set_sge(qp: *mut ibv_qp_ex, lkey: u32, address: u64, length: u32) {
    let sge = ibv_sge { addr: address, length, lkey };
    // SAFETY: as the module says; a batch is open.
    unsafe { wr_set_sge_list(qp, 1, &sge) };
}

unsafe extern "C" fn wr_set_sge_list(qp: *mut ibv_qp_ex, count: usize, from: *const ibv_sge) {
    // SAFETY: as the module says; a batch is open.
    unsafe {
        last(qp, |request| {
            request.data = Data::List(list(from, count));
            Ok(())
        });
    }
}

unsafe extern "C" fn wr_set_inline_data(
    qp: *mut ibv_qp_ex,
    from: *mut std::ffi::c_void,
    length: usize,
) {
    let part = ibv_data_buf { addr: from, length };
    // SAFETY: as the module says; a batch is open.
    unsafe { wr_set_inline_data_list(qp, 1, &part) };
}

unsafe extern "C" fn wr_set_inline_data_list(
    qp: *mut ibv_qp_ex,
    count: usize,
    parts: *const ibv_data_buf,
) {
    // SAFETY: as the module says; a batch is open.
    unsafe {
        let most = (*qp.cast::<SoftQp>()).max_inline;
        last(qp, |request| {
            let parts = if count == 0 { &[] } else { std::slice::from_raw_parts(parts, count) };
            let parts = parts.iter().map(|part| (part.addr.cast_const().cast(), part.length));
            request.data = Data::Inline(gather_inline(parts, most)?);
            Ok(())
        });
    }
}

unsafe extern "C" fn wr_set_ud_addr(qp: *mut ibv_qp_ex, ah: *mut ibv_ah, qpn: u32, qkey: u32) {
    // SAFETY: as the module says; a batch is open.
    unsafe {
        last(qp, |request| {
            let to = address::destination(ah, qpn, qkey.into()).ok_or(libc::EINVAL)?;
            request.destination = Some(to);
            Ok(())
        });
    }
}

unsafe extern "C" fn wr_set_xrc_srqn(qp: *mut ibv_qp_ex, number: u32) {
    // SAFETY: as the module says; a batch is open.
    unsafe {
        last(qp, |request| {
            request.remote_srq = Some(number);
            Ok(())
        });
    }
}
