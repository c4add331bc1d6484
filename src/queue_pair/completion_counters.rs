//! Counters of what a queue pair completes.

use super::QueuePair;
use super::transport::Transport;
use crate::completion::{CompletionCounter, CountedOperations};
use crate::error::{Error, Result};
use crate::ffi;
use crate::parent::Parent;

impl<'res, T: Transport> QueuePair<'res, T> {
    /// `ibv_qp_attach_comp_cntr`: counts these operations with `counter`, which the queue pair holds for as long as it
    /// exists: borrowed, or in an `Arc`. Several counters can count different operations, and a counter can count for several
    /// queue pairs. The queue pair must be in the state `RESET` or `INIT`. There since rdma-core 65.
    ///
    /// ```compile_fail,E0597
    /// # use ibverbs::completion::{CompletionCounter, CountedOperations};
    /// # use ibverbs::QueuePair;
    /// fn count<'a>(queue_pair: &mut QueuePair<'a>, counter: CompletionCounter<'a>) {
    ///     // It would be destroyed before the queue pair.
    ///     queue_pair.attach_completion_counter(&counter, CountedOperations::SEND).unwrap();
    /// }
    /// ```
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: `operations` is empty, the counter is of another context, the queue pair is in another state, or a
    ///    counter counts one of the operations already.
    ///  - `EOPNOTSUPP`: the device has no counters, or none for one of the operations (see
    ///    [`CompletionCounterCapabilities::operations`](crate::completion::CompletionCounterCapabilities::operations)).
    ///  - `ENOMEM`: out of memory.
    #[doc(alias = "ibv_qp_attach_comp_cntr")]
    pub fn attach_completion_counter(
        &mut self,
        counter: impl Into<Parent<'res, CompletionCounter<'res>>>,
        operations: CountedOperations,
    ) -> Result<()> {
        const VERB: &str = "ibv_qp_attach_comp_cntr";
        Error::invalid_if(operations.is_empty(), VERB, "there is no operation to count")?;
        let counter = counter.into();
        // SAFETY: both objects are live.
        if unsafe { (*counter.as_raw()).context != (*self.as_raw()).context } {
            return Err(Error::invalid(VERB, "the counter is of another context"));
        }
        let mut attributes =
            ffi::ibv_qp_attach_comp_cntr_attr { comp_mask: 0, op_mask: operations.bits() };
        let counters = &mut self.object.counters;
        let no_memory = |_| Error::with_reason(VERB, libc::ENOMEM, "no memory to hold the counter");
        counters.try_reserve(1).map_err(no_memory)?;
        // Also if it fails: the device may count with it.
        counters.push(counter.clone());
        // SAFETY: the queue pair is live, and the counter is for as long as the queue pair, which holds it.
        let returned = unsafe {
            ffi::ibv_qp_attach_comp_cntr(self.as_raw(), counter.as_raw(), &mut attributes)
        };
        ffi::status(VERB, returned)
    }
}
