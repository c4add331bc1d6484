//! Counters of what a queue pair completes.

use super::QueuePair;
use super::transport::Transport;
use crate::completion::{CompletionCounter, CountedOperations};
use crate::error::{Error, Result};
use crate::ffi;

impl<'res, T: Transport> QueuePair<'res, T> {
    /// `ibv_qp_attach_comp_cntr`: counts these operations with `counter`, for as long as the queue pair exists. Several
    /// counters can count different operations, and a counter can count for several queue pairs. The queue pair must be
    /// in the state `RESET` or `INIT`. There since rdma-core 65.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: `operations` is empty, the counter is of another context, the queue pair is in another state, or a
    ///    counter counts one of the operations already.
    ///  - `EOPNOTSUPP`: the device has no counters, or none for one of the operations (see
    ///    [`CompletionCounterCapabilities::operations`](crate::completion::CompletionCounterCapabilities::operations)).
    #[doc(alias = "ibv_qp_attach_comp_cntr")]
    pub fn attach_completion_counter(
        &self,
        counter: &'res CompletionCounter<'_>,
        operations: CountedOperations,
    ) -> Result<()> {
        const VERB: &str = "ibv_qp_attach_comp_cntr";
        Error::invalid_if(operations.is_empty(), VERB, "there is no operation to count")?;
        // SAFETY: both objects are live.
        if unsafe { (*counter.as_raw()).context != (*self.as_raw()).context } {
            return Err(Error::invalid(VERB, "the counter is of another context"));
        }
        let mut attributes =
            ffi::ibv_qp_attach_comp_cntr_attr { comp_mask: 0, op_mask: operations.bits() };
        // SAFETY: the queue pair is live, and the counter is for as long as the queue pair.
        let returned = unsafe {
            ffi::ibv_qp_attach_comp_cntr(self.as_raw(), counter.as_raw(), &mut attributes)
        };
        ffi::status(VERB, returned)
    }
}
