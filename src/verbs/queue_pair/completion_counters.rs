//! Completion counters of a queue pair.

use super::QueuePair;
use super::transport::Transport;
use crate::base::{Error, Parent, Result, ffi};
use crate::verbs::completion::{CompletionCounter, CountedOperations};

impl<'res, T: Transport> QueuePair<'res, T> {
    /// `ibv_qp_attach_comp_cntr` (rdma-core 65 or later): counts these operations with `counter`, in RESET or INIT. The
    /// queue pair holds the counter, borrowed or in an `Arc`, as long as it exists. A counter can count for several
    /// queue pairs, and each operation can have its own counter.
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
    ///    counter already counts one of the operations.
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
        // Even after a failure the device may count with it.
        counters.push(counter.clone());
        // SAFETY: the queue pair is live, and holds the counter, which so outlives it.
        let returned = unsafe {
            ffi::ibv_qp_attach_comp_cntr(self.as_raw(), counter.as_raw(), &mut attributes)
        };
        ffi::status(VERB, returned)
    }
}
