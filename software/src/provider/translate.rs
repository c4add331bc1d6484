//! Translates C's work requests for the engine.

use std::ffi::c_int;

use super::address;
use crate::ffi::*;
use crate::transport::queue_pair::{QueuePair, Transport};
use crate::transport::responder::MAX_MESSAGE;
use crate::transport::work::{Bind, Data, Extra, Operation, Receive, SendRequest, Sge};

/// The longest message of SRD: the largest packet of EFA.
pub(super) const SRD_MESSAGE: u32 = 8928;

/// The longest READ or WRITE of SRD.
pub(super) const SRD_RDMA: u32 = 1 << 30;

/// The properties of a queue pair that a request is checked against when it is posted.
#[derive(Clone, Copy)]
pub(super) struct Rules {
    pub(super) transport: Transport,
    pub(super) mtu: usize,
    pub(super) max_sge: usize,
    pub(super) max_inline: usize,
    /// The queue pair may have no outstanding READ or atomic request.
    pub(super) no_fetches: bool,
    pub(super) all_signaled: bool,
}

impl Rules {
    pub(super) fn of(qp: &QueuePair) -> Self {
        Self {
            transport: qp.transport,
            mtu: qp.mtu,
            max_sge: qp.cap.max_send_sge as usize,
            max_inline: qp.cap.max_inline_data as usize,
            no_fetches: qp.attr.max_rd_atomic == 0,
            all_signaled: qp.all_signaled,
        }
    }

    /// Whether the queue pair accepts such a request. Computes its length.
    pub(super) fn check(&self, request: &mut SendRequest) -> Result<(), c_int> {
        let operation = &request.operation;
        let allowed = match (self.transport, operation) {
            (Transport::Rc | Transport::XrcSend, _) => {
                !(operation.is_fetching() && self.no_fetches)
            }
            (Transport::Uc, _) => !operation.is_fetching(),
            (Transport::DcInitiator, _) => {
                !(operation.is_fetching() && self.no_fetches || operation.is_local())
            }
            (Transport::Ud, Operation::Send) => true,
            (Transport::Srd, _) => self.allows_srd(request),
            _ => false,
        };
        let invalidates = matches!(request.extra, Extra::Invalidate(_));
        if !allowed || (invalidates && !self.transport.is_reliable()) {
            return Err(libc::EINVAL);
        }
        let length = match &request.data {
            Data::List(list) if list.len() > self.max_sge => return Err(libc::EINVAL),
            Data::List(list) => list.iter().map(|sge| u64::from(sge.length)).sum(),
            Data::Inline(_) if operation.returns_data() => return Err(libc::EINVAL),
            Data::Inline(bytes) => bytes.len() as u64,
        };
        let most = match (self.transport, operation) {
            (Transport::Ud, _) => self.mtu as u64,
            (Transport::Srd, Operation::Send) => SRD_MESSAGE.into(),
            (Transport::Srd, _) => SRD_RDMA.into(),
            _ => MAX_MESSAGE.into(),
        };
        let eight = match operation {
            Operation::FetchAdd { address, .. }
            | Operation::CompareSwap { address, .. }
            | Operation::AtomicWrite { address, .. } => length == 8 && address % 8 == 0,
            _ => true,
        };
        let needs_address =
            matches!(self.transport, Transport::Ud | Transport::Srd | Transport::DcInitiator);
        let addressed = request.destination.is_some() == needs_address;
        // Requests that stay on this device name no queue of the peer.
        let named = request.remote_srq.is_some() == (self.transport == Transport::XrcSend)
            || operation.is_local();
        let exists = request.remote_srq.is_none_or(|number| number <= 0xff_ffff);
        if length > most || !eight || !addressed || !named || !exists {
            return Err(libc::EINVAL);
        }
        request.length = length as u32;
        Ok(())
    }

    /// What EFA's provider takes: no unsignaled requests, no other flags, and one element for READ and WRITE.
    fn allows_srd(&self, request: &SendRequest) -> bool {
        let fits = match (&request.operation, &request.data) {
            (Operation::Send, _) => true,
            (Operation::Write { .. } | Operation::Read { .. }, Data::List(list)) => list.len() <= 1,
            _ => false,
        };
        fits && (request.signaled || self.all_signaled) && !request.solicited && !request.fence
    }
}

/// # Safety
///
/// The list has that many elements.
pub(super) unsafe fn list(list: *const ibv_sge, count: usize) -> Vec<Sge> {
    // SAFETY: the caller vouches for it; an empty list may be null.
    let list = if count == 0 { &[] } else { unsafe { std::slice::from_raw_parts(list, count) } };
    // Elements of length 0 name no memory, and need no key.
    let element = |sge: &ibv_sge| Sge { address: sge.addr, length: sge.length, lkey: sge.lkey };
    list.iter().map(element).collect()
}

/// Copies inline data out of the caller's memory, which the caller may reuse when the post returns.
///
/// # Safety
///
/// Each part is readable memory of that length.
pub(super) unsafe fn gather_inline(
    parts: impl Iterator<Item = (*const u8, usize)>,
    most: usize,
) -> Result<Vec<u8>, c_int> {
    let mut bytes = Vec::new();
    for (address, length) in parts {
        if length > most - bytes.len() {
            return Err(libc::EINVAL);
        }
        if length > 0 {
            // SAFETY: the caller vouches for it.
            bytes.extend_from_slice(unsafe { std::slice::from_raw_parts(address, length) });
        }
    }
    Ok(bytes)
}

/// # Safety
///
/// The request is readable, with its list; its address handle is live if it needs one.
pub(super) unsafe fn send_request(wr: &ibv_send_wr, rules: &Rules) -> Result<SendRequest, c_int> {
    type W = ibv_wr_opcode;
    let flags = wr.send_flags;
    let has = |flag: ibv_send_flags| flags & flag.0 != 0;
    // SAFETY: the caller vouches for the request; which member of a union counts follows from its opcode,
    // and all of them are plain integers and pointers.
    let mut request = unsafe {
        let immediate = Extra::Immediate(wr.__bindgen_anon_1.imm_data);
        let invalidate = wr.__bindgen_anon_1.invalidate_rkey;
        let (rdma, atomic) = (wr.wr.rdma, wr.wr.atomic);
        let (address, rkey) = (rdma.remote_addr, rdma.rkey);
        let (operation, extra) = match wr.opcode {
            W::IBV_WR_SEND => (Operation::Send, Extra::None),
            W::IBV_WR_SEND_WITH_IMM => (Operation::Send, immediate),
            W::IBV_WR_SEND_WITH_INV => (Operation::Send, Extra::Invalidate(invalidate)),
            W::IBV_WR_RDMA_WRITE => (Operation::Write { address, rkey }, Extra::None),
            W::IBV_WR_RDMA_WRITE_WITH_IMM => (Operation::Write { address, rkey }, immediate),
            W::IBV_WR_RDMA_READ => (Operation::Read { address, rkey }, Extra::None),
            W::IBV_WR_ATOMIC_CMP_AND_SWP => {
                let (address, rkey) = (atomic.remote_addr, atomic.rkey);
                let (compare, swap) = (atomic.compare_add, atomic.swap);
                (Operation::CompareSwap { address, rkey, compare, swap }, Extra::None)
            }
            W::IBV_WR_ATOMIC_FETCH_AND_ADD => {
                let (address, rkey) = (atomic.remote_addr, atomic.rkey);
                (Operation::FetchAdd { address, rkey, add: atomic.compare_add }, Extra::None)
            }
            W::IBV_WR_ATOMIC_WRITE => (Operation::AtomicWrite { address, rkey }, Extra::None),
            W::IBV_WR_LOCAL_INV => (Operation::Invalidate { rkey: invalidate }, Extra::None),
            W::IBV_WR_BIND_MW => {
                let bind = &wr.__bindgen_anon_2.bind_mw;
                (Operation::Bind(bind_request(bind.mw, bind.rkey, &bind.bind_info)?), Extra::None)
            }
            _ => return Err(libc::EINVAL),
        };
        let count = usize::try_from(wr.num_sge).map_err(|_| libc::EINVAL)?;
        let data = if operation.is_local() {
            Data::List(Vec::new())
        } else if count > rules.max_sge {
            return Err(libc::EINVAL);
        } else if has(ibv_send_flags::IBV_SEND_INLINE) {
            let parts = list(wr.sg_list, count);
            let parts = parts.iter().map(|sge| (sge.address as *const u8, sge.length as usize));
            Data::Inline(gather_inline(parts, rules.max_inline)?)
        } else {
            Data::List(list(wr.sg_list, count))
        };
        // SRD has READ and WRITE only field by field, and DC everything.
        if rules.transport == Transport::Srd && !matches!(operation, Operation::Send) {
            return Err(libc::EINVAL);
        }
        let destination = if matches!(rules.transport, Transport::Ud | Transport::Srd) {
            let ud = &wr.wr.ud;
            let to = address::destination(ud.ah, ud.remote_qpn, ud.remote_qkey.into());
            Some(to.ok_or(libc::EINVAL)?)
        } else {
            None
        };
        let is_extended = rules.transport == Transport::XrcSend && !operation.is_local();
        SendRequest {
            id: wr.wr_id,
            operation,
            extra,
            data,
            length: 0,
            signaled: has(ibv_send_flags::IBV_SEND_SIGNALED),
            solicited: has(ibv_send_flags::IBV_SEND_SOLICITED),
            fence: has(ibv_send_flags::IBV_SEND_FENCE),
            destination,
            remote_srq: is_extended.then_some(wr.qp_type.xrc.remote_srqn),
        }
    };
    rules.check(&mut request)?;
    Ok(request)
}

/// # Safety
///
/// The window is live, and its region too if there is one.
pub(super) unsafe fn bind_request(
    mw: *mut ibv_mw,
    rkey: u32,
    info: &ibv_mw_bind_info,
) -> Result<Bind, c_int> {
    // SAFETY: the caller vouches for both.
    unsafe {
        if mw.is_null() || (info.mr.is_null() && info.length > 0) {
            return Err(libc::EINVAL);
        }
        Ok(Bind {
            window: (*mw).handle,
            rkey,
            region: info.mr.as_ref().map_or(0, |mr| mr.lkey),
            address: info.addr,
            length: info.length,
            access: info.mw_access_flags,
        })
    }
}

/// # Safety
///
/// The request is readable, with its list.
pub(super) unsafe fn receive(wr: &ibv_recv_wr, most: u32) -> Result<Receive, c_int> {
    let count = usize::try_from(wr.num_sge).map_err(|_| libc::EINVAL)?;
    if count > most as usize {
        return Err(libc::EINVAL);
    }
    // SAFETY: the caller vouches for it.
    Ok(Receive { id: wr.wr_id, list: unsafe { list(wr.sg_list, count) } })
}
