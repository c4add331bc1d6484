//! What posts work requests to queue pairs: prepared requests and lists of them, batches, and the requests that bind
//! memory windows. The requests themselves are in `operation`.

mod batch;
mod bind_window;
mod collector;
mod explain;
mod extended_operations;
mod list;
mod prepared_request;

pub use batch::Batch;
pub use bind_window::{WindowBinding, WindowMemory};
use explain::explain_request;
pub(crate) use explain::{explain_receive, explain_send};
pub(crate) use extended_operations::function;
pub use extended_operations::{FlushPlacement, SendOperations};
pub use list::{ListError, ReceiveList, SendList, WorkRequestList};
pub(super) use prepared_request::RawRequest;
pub use prepared_request::{ElementSlice, Prepared, PreparedReceive, PreparedRequest};

use crate::foreign_enum::foreign_enum;

/// The longest message that a request can carry: 2 GiB. The limit of a port may be lower:
/// [`PortAttributes::max_message_size`](crate::PortAttributes::max_message_size).
pub const MAX_MESSAGE_LENGTH: u64 = 1 << 31;

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
