//! What a message carries in addition to its data.

use crate::base::ffi;
use crate::base::ffi::ibv_wr_opcode as Opcode;
use crate::verbs::memory::RemoteMemoryRegion;
use crate::verbs::queue_pair::SendOperations as Extended;

/// 32 bits for the completion of the peer's receive: see [`immediate`](crate::SendWorkRequest::immediate).
#[derive(Clone, Copy, Debug)]
pub struct Immediate(pub(super) u32);

/// An rkey of the peer that a message invalidates: see [`invalidate`](crate::SendWorkRequest::invalidate).
#[derive(Clone, Copy, Debug)]
pub struct Invalidate(pub(super) u32);

/// What a message carries in addition to its data: `()`, [`Immediate`] or [`Invalidate`]. Sealed.
pub trait Extra: sealed::Extra {}

impl Extra for () {}
impl Extra for Immediate {}
impl Extra for Invalidate {}

/// What a write carries in addition to its data: `()` or [`Immediate`].
pub trait WriteExtra: sealed::WriteExtra {}

impl WriteExtra for () {}
impl WriteExtra for Immediate {}

pub(super) mod sealed {
    use super::*;

    pub trait Extra: Copy {
        const SEND: Opcode;
        const EXTENDED_SEND: Extended;

        /// # Safety
        ///
        /// The pointer is to a request, which may be uninitialised.
        unsafe fn fill(self, request: *mut ffi::ibv_send_wr);

        /// # Safety
        ///
        /// As for `Kind::emit`.
        unsafe fn send(self, queue_pair: *mut ffi::ibv_qp_ex);
    }

    pub trait WriteExtra: Extra {
        const WRITE: Opcode;
        const EXTENDED_WRITE: Extended;

        /// # Safety
        ///
        /// As for `Kind::emit`.
        unsafe fn write(self, queue_pair: *mut ffi::ibv_qp_ex, remote: &RemoteMemoryRegion);
    }
}

impl sealed::Extra for () {
    const SEND: Opcode = Opcode::IBV_WR_SEND;
    const EXTENDED_SEND: Extended = Extended::SEND;

    #[inline(always)]
    unsafe fn fill(self, _: *mut ffi::ibv_send_wr) {}

    #[inline(always)]
    unsafe fn send(self, queue_pair: *mut ffi::ibv_qp_ex) {
        // SAFETY: the caller vouches for queue pair and function.
        unsafe { (*queue_pair).wr_send.unwrap_unchecked()(queue_pair) }
    }
}

impl sealed::WriteExtra for () {
    const WRITE: Opcode = Opcode::IBV_WR_RDMA_WRITE;
    const EXTENDED_WRITE: Extended = Extended::WRITE;

    #[inline(always)]
    unsafe fn write(self, queue_pair: *mut ffi::ibv_qp_ex, remote: &RemoteMemoryRegion) {
        // SAFETY: as for `send`.
        unsafe {
            let write = (*queue_pair).wr_rdma_write.unwrap_unchecked();
            write(queue_pair, remote.rkey, remote.address);
        }
    }
}

impl sealed::Extra for Immediate {
    const SEND: Opcode = Opcode::IBV_WR_SEND_WITH_IMM;
    const EXTENDED_SEND: Extended = Extended::SEND_WITH_IMMEDIATE;

    #[inline(always)]
    unsafe fn fill(self, request: *mut ffi::ibv_send_wr) {
        // SAFETY: the caller vouches for the pointer.
        unsafe { (*request).__bindgen_anon_1.imm_data = self.0.to_be() };
    }

    #[inline(always)]
    unsafe fn send(self, queue_pair: *mut ffi::ibv_qp_ex) {
        // SAFETY: the caller vouches for queue pair and function.
        unsafe { (*queue_pair).wr_send_imm.unwrap_unchecked()(queue_pair, self.0.to_be()) }
    }
}

impl sealed::WriteExtra for Immediate {
    const WRITE: Opcode = Opcode::IBV_WR_RDMA_WRITE_WITH_IMM;
    const EXTENDED_WRITE: Extended = Extended::WRITE_WITH_IMMEDIATE;

    #[inline(always)]
    unsafe fn write(self, queue_pair: *mut ffi::ibv_qp_ex, remote: &RemoteMemoryRegion) {
        // SAFETY: as for `send`.
        unsafe {
            let write = (*queue_pair).wr_rdma_write_imm.unwrap_unchecked();
            write(queue_pair, remote.rkey, remote.address, self.0.to_be());
        }
    }
}

impl sealed::Extra for Invalidate {
    const SEND: Opcode = Opcode::IBV_WR_SEND_WITH_INV;
    const EXTENDED_SEND: Extended = Extended::SEND_WITH_INVALIDATE;

    #[inline(always)]
    unsafe fn fill(self, request: *mut ffi::ibv_send_wr) {
        // SAFETY: the caller vouches for the pointer.
        unsafe { (*request).__bindgen_anon_1.invalidate_rkey = self.0 };
    }

    #[inline(always)]
    unsafe fn send(self, queue_pair: *mut ffi::ibv_qp_ex) {
        // SAFETY: the caller vouches for queue pair and function.
        unsafe { (*queue_pair).wr_send_inv.unwrap_unchecked()(queue_pair, self.0) }
    }
}
