//! The operations of requests, as C names them.

use crate::foreign_enum::foreign_enum;

foreign_enum! {
    /// `enum ibv_wr_opcode`: the operation of a request on the send queue.
    #[doc(alias = "ibv_wr_opcode")]
    pub enum WorkRequestOpcode: ibv_wr_opcode(u32) {
        /// An RDMA write.
        Write = IBV_WR_RDMA_WRITE,
        /// An RDMA write that consumes a receive, whose completion carries an immediate.
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
