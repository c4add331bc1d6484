//! The operations and functions of the extended posting interface.

use std::ptr::NonNull;

use crate::base::{c_enum, ffi};

macro_rules! operations {
    ($($(#[doc = $doc:literal])* $name:ident = $constant:ident, $function:ident;)+) => {
        bitflags::bitflags! {
            /// `enum ibv_qp_create_send_ops_flags`: operations for
            /// [`QueuePairBuilder::extended`](crate::QueuePairBuilder::extended).
            #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
            #[doc(alias = "ibv_qp_create_send_ops_flags")]
            pub struct SendOperations: u64 {
                $(
                    $(#[doc = $doc])*
                    const $name = ffi::ibv_qp_create_send_ops_flags::$constant.0 as u64;
                )+
            }
        }

        impl SendOperations {
            /// # Safety
            ///
            /// The queue pair is live.
            pub(crate) unsafe fn of(queue_pair: NonNull<ffi::ibv_qp_ex>) -> Self {
                // SAFETY: the caller vouches for it.
                let raw = unsafe { queue_pair.as_ref() };
                let mut found = Self::empty();
                // A batch needs these three.
                if raw.wr_start.is_some() && raw.wr_complete.is_some() && raw.wr_abort.is_some() {
                    $(if raw.$function.is_some() {
                        found |= Self::$name;
                    })+
                }
                found
            }
        }
    };
}

operations! {
    /// RDMA writes.
    WRITE = IBV_QP_EX_WITH_RDMA_WRITE, wr_rdma_write;
    /// RDMA writes with an immediate.
    WRITE_WITH_IMMEDIATE = IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM, wr_rdma_write_imm;
    /// Sends.
    SEND = IBV_QP_EX_WITH_SEND, wr_send;
    /// Sends with an immediate.
    SEND_WITH_IMMEDIATE = IBV_QP_EX_WITH_SEND_WITH_IMM, wr_send_imm;
    /// RDMA reads.
    READ = IBV_QP_EX_WITH_RDMA_READ, wr_rdma_read;
    /// Compare-and-swaps.
    COMPARE_SWAP = IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP, wr_atomic_cmp_swp;
    /// Fetch-and-adds.
    FETCH_ADD = IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD, wr_atomic_fetch_add;
    /// Invalidating local keys.
    LOCAL_INVALIDATE = IBV_QP_EX_WITH_LOCAL_INV, wr_local_inv;
    /// Binding memory windows.
    BIND_MEMORY_WINDOW = IBV_QP_EX_WITH_BIND_MW, wr_bind_mw;
    /// Sends that invalidate an rkey of the peer.
    SEND_WITH_INVALIDATE = IBV_QP_EX_WITH_SEND_WITH_INV, wr_send_inv;
    /// Sends that the device segments.
    TSO = IBV_QP_EX_WITH_TSO, wr_send_tso;
    /// Flushes.
    FLUSH = IBV_QP_EX_WITH_FLUSH, wr_flush;
    /// Atomic writes.
    ATOMIC_WRITE = IBV_QP_EX_WITH_ATOMIC_WRITE, wr_atomic_write;
}

bitflags::bitflags! {
    /// `enum ibv_placement_type`: what a flush guarantees for the written data.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
    #[doc(alias = "ibv_placement_type")]
    pub struct FlushPlacement: u8 {
        /// The data is visible to all.
        const GLOBAL = ffi::ibv_placement_type::IBV_FLUSH_GLOBAL.0 as u8;
        /// The data survives a power loss.
        const PERSISTENT = ffi::ibv_placement_type::IBV_FLUSH_PERSISTENT.0 as u8;
    }
}

/// Bits: those of [`SendOperations`], and those below.
pub(crate) mod function {
    use std::ptr::NonNull;

    #[cfg(feature = "mlx5")]
    use crate::base::direct;
    use crate::base::{Error, QueuePairType, ffi};
    use crate::verbs::queue_pair::SendOperations;
    use crate::verbs::queue_pair::transport::DriverTransport;

    /// No function: the queue pair has a fixed peer.
    pub(crate) const READY: u64 = 1 << 63;
    pub(crate) const SET_SGE: u64 = 1 << 62;
    pub(crate) const SET_SGE_LIST: u64 = 1 << 61;
    pub(crate) const SET_INLINE: u64 = 1 << 60;
    pub(crate) const SET_UD_ADDRESS: u64 = 1 << 59;
    pub(crate) const SET_XRC_SRQ: u64 = 1 << 58;
    /// No function: all elements of a list must have one length. In rdma-core before 55.4 and 64, rxe's
    /// `ibv_wr_set_sge_list` takes the first element's length for all.
    pub(crate) const ONE_LENGTH: u64 = 1 << 57;
    #[cfg(feature = "mlx5")]
    pub(crate) const SET_DC_ADDRESS: u64 = 1 << 56;
    #[cfg(feature = "mlx5")]
    pub(crate) const SET_DC_STREAM: u64 = 1 << 55;
    #[cfg(feature = "mlx5")]
    pub(crate) const SET_MEMORY_KEY: u64 = 1 << 54;

    /// # Safety
    ///
    /// The queue pair is live, and has `operations`.
    pub(crate) unsafe fn of(
        queue_pair: NonNull<ffi::ibv_qp_ex>,
        operations: SendOperations,
        (kind, driver): (QueuePairType, Option<DriverTransport>),
        max_send_sge: u32,
    ) -> u64 {
        // SAFETY: the caller vouches for it.
        let raw = unsafe { queue_pair.as_ref() };
        let mut found = operations.bits();
        let has_peer = driver.is_none()
            && !matches!(kind, QueuePairType::UnreliableDatagram | QueuePairType::XrcSend);
        let by_address = !is_connected(kind) && !driver.is_some_and(DriverTransport::is_dc);
        for (there, function) in [
            (has_peer, READY),
            (raw.wr_set_sge.is_some() && max_send_sge > 0, SET_SGE),
            (raw.wr_set_sge_list.is_some(), SET_SGE_LIST),
            (raw.wr_set_inline_data.is_some(), SET_INLINE),
            (raw.wr_set_ud_addr.is_some() && by_address, SET_UD_ADDRESS),
            (raw.wr_set_xrc_srqn.is_some() && kind == QueuePairType::XrcSend, SET_XRC_SRQ),
        ] {
            if there {
                found |= function;
            }
        }
        #[cfg(feature = "mlx5")]
        if driver.is_some_and(DriverTransport::is_dc) {
            // SAFETY: the queue pair is live, and the builder has checked that the device is mlx5.
            let direct =
                unsafe { direct::mlx5dv_qp_ex_from_ibv_qp_ex(queue_pair.as_ptr()).as_ref() };
            let has = |there: bool, function| if there { function } else { 0 };
            if let Some(direct) = direct {
                found |= has(direct.wr_set_dc_addr.is_some(), SET_DC_ADDRESS);
                let streams = direct.wr_set_dc_addr_stream.is_some()
                    && driver.is_some_and(DriverTransport::has_streams);
                found |= has(streams, SET_DC_STREAM);
            }
        }
        found
    }

    fn is_connected(kind: QueuePairType) -> bool {
        use QueuePairType as T;

        matches!(kind, T::ReliableConnected | T::UnreliableConnected | T::XrcSend | T::RawPacket)
    }

    #[cold]
    pub(crate) fn unsupported(missing: u64) -> Error {
        let unsupported = |verb, reason| Error::with_reason(verb, libc::EOPNOTSUPP, reason);
        let operations = SendOperations::from_bits_truncate(missing);
        if !operations.is_empty() {
            let reason =
                "the queue pair was not built for this operation of the extended interface";
            return unsupported("ibv_wr_start", reason);
        }
        if missing & READY != 0 {
            let reason =
                "the queue pair has no peer: the request must say where it goes, with `to`";
            return Error::invalid("ibv_wr_start", reason);
        }
        let (verb, reason) = match missing & missing.wrapping_neg() {
            SET_SGE => ("ibv_wr_set_sge", "the queue pair takes no gather elements"),
            SET_SGE_LIST => ("ibv_wr_set_sge_list", "the provider takes no lists of elements"),
            SET_INLINE => ("ibv_wr_set_inline_data", "the provider takes no inline data"),
            SET_UD_ADDRESS => ("ibv_wr_set_ud_addr", "the queue pair does not send datagrams"),
            #[cfg(feature = "mlx5")]
            SET_DC_ADDRESS => {
                ("mlx5dv_wr_set_dc_addr", "the queue pair is not a DC initiator of mlx5")
            }
            #[cfg(feature = "mlx5")]
            SET_MEMORY_KEY => {
                ("mlx5dv_wr_mr_list", "the queue pair was not built with extended_with_memory_keys")
            }
            #[cfg(feature = "mlx5")]
            SET_DC_STREAM => (
                "mlx5dv_wr_set_dc_addr_stream",
                "the queue pair is not a DC initiator with streams",
            ),
            _ => ("ibv_wr_set_xrc_srqn", "the queue pair is not a sending XRC one"),
        };
        unsupported(verb, reason)
    }
}

c_enum! {
    /// `enum ibv_wr_opcode`: the operation of a request on the send queue.
    #[doc(alias = "ibv_wr_opcode")]
    pub enum WorkRequestOpcode: ibv_wr_opcode(u32) {
        /// An RDMA write.
        Write = IBV_WR_RDMA_WRITE,
        /// An RDMA write with an immediate, which consumes a receive.
        WriteWithImmediate = IBV_WR_RDMA_WRITE_WITH_IMM,
        /// A send.
        Send = IBV_WR_SEND,
        /// A send with an immediate.
        SendWithImmediate = IBV_WR_SEND_WITH_IMM,
        /// An RDMA read.
        Read = IBV_WR_RDMA_READ,
        /// A compare-and-swap.
        CompareSwap = IBV_WR_ATOMIC_CMP_AND_SWP,
        /// A fetch-and-add.
        FetchAdd = IBV_WR_ATOMIC_FETCH_AND_ADD,
        /// Invalidating a local key.
        LocalInvalidate = IBV_WR_LOCAL_INV,
        /// Binding a memory window.
        BindMemoryWindow = IBV_WR_BIND_MW,
        /// A send that invalidates an rkey of the peer.
        SendWithInvalidate = IBV_WR_SEND_WITH_INV,
        /// A send that the device segments.
        Tso = IBV_WR_TSO,
        /// Defined by the provider.
        Driver1 = IBV_WR_DRIVER1,
        /// A flush.
        Flush = IBV_WR_FLUSH,
        /// An atomic write.
        AtomicWrite = IBV_WR_ATOMIC_WRITE,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    unsafe extern "C" fn nothing(_: *mut ffi::ibv_qp_ex) {}
    unsafe extern "C" fn complete(_: *mut ffi::ibv_qp_ex) -> i32 {
        0
    }

    #[test]
    fn operations_are_those_with_functions() {
        let mut raw = ffi::ibv_qp_ex { wr_send: Some(nothing), ..Default::default() };
        // SAFETY: the struct is live during the calls.
        let of = |raw: &mut _| unsafe { SendOperations::of(NonNull::from(raw)) };
        assert_eq!(of(&mut raw), SendOperations::empty(), "no batch without its brackets");
        raw.wr_start = Some(nothing);
        raw.wr_abort = Some(nothing);
        raw.wr_complete = Some(complete);
        assert_eq!(of(&mut raw), SendOperations::SEND);
        assert_eq!(SendOperations::all().bits(), (1 << 13) - 1);
    }

    #[test]
    fn what_is_missing_is_said() {
        for (missing, text) in [
            (SendOperations::READ.bits() | function::READY, "not built for this operation"),
            (function::READY | function::SET_SGE, "where it goes"),
            (function::SET_SGE, "no gather elements"),
            (function::SET_SGE_LIST, "lists of elements"),
            (function::SET_INLINE, "no inline data"),
            (function::SET_UD_ADDRESS, "does not send datagrams"),
            (function::SET_XRC_SRQ, "not a sending XRC one"),
        ] {
            let error = function::unsupported(missing).to_string();
            assert!(error.contains(text), "{error}");
        }
    }
}
