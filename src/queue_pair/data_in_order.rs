//! The order in which the data of a message reaches memory.

use super::QueuePair;
use super::opcode::WorkRequestOpcode;
use super::transport::Transport;
use crate::ffi;

bitflags::bitflags! {
    /// `enum ibv_query_qp_data_in_order_caps`: the order in which the data of a message is written to
    /// memory. See [`QueuePair::data_in_order`].
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
    #[doc(alias = "ibv_query_qp_data_in_order_caps")]
    pub struct DataInOrder: u32 {
        /// The whole message is written in order: when its last byte is there, all of it is.
        const WHOLE_MESSAGE =
            ffi::ibv_query_qp_data_in_order_caps::IBV_QUERY_QP_DATA_IN_ORDER_WHOLE_MSG.0;
        /// The bytes within each aligned block of 128 are written in order.
        const ALIGNED_128_BYTES =
            ffi::ibv_query_qp_data_in_order_caps::IBV_QUERY_QP_DATA_IN_ORDER_ALIGNED_128_BYTES.0;
    }
}

impl<T: Transport> QueuePair<'_, T> {
    /// `ibv_query_qp_data_in_order`: the order in which the data of an operation is written to memory. An
    /// empty set guarantees nothing.
    #[doc(alias = "ibv_query_qp_data_in_order")]
    pub fn data_in_order(&self, operation: WorkRequestOpcode) -> DataInOrder {
        use ffi::ibv_query_qp_data_in_order_flags as query;

        let flags = query::IBV_QUERY_QP_DATA_IN_ORDER_RETURN_CAPS.0;
        // SAFETY: the queue pair is live; any number is allowed as the operation.
        let found =
            unsafe { ffi::ibv_query_qp_data_in_order(self.as_raw(), operation.into(), flags) };
        DataInOrder::from_bits_truncate(u32::try_from(found).unwrap_or(0))
    }
}
