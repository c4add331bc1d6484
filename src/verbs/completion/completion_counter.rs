use crate::base::{Handle, Result, c_enum, debug, ffi, object, resource};
use crate::verbs::device::{Context, ContextRef};

object!(ibv_comp_cntr, ibv_destroy_comp_cntr);

c_enum! {
    /// `enum ibv_comp_cntr_type`: what a [`CompletionCounter`] counts.
    #[doc(alias = "ibv_comp_cntr_type")]
    pub enum CompletionCounterUnit: ibv_comp_cntr_type(u32) {
        /// Requests.
        Requests = IBV_COMP_CNTR_TYPE_WRS,
        /// Bytes.
        Bytes = IBV_COMP_CNTR_TYPE_BYTES,
    }
}

bitflags::bitflags! {
    /// `enum ibv_qp_attach_comp_cntr_op`: the operations of a queue pair that a [`CompletionCounter`] counts.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
    #[doc(alias = "ibv_qp_attach_comp_cntr_op")]
    pub struct CountedOperations: u32 {
        /// Sends.
        const SEND = ffi::ibv_qp_attach_comp_cntr_op::IBV_QP_ATTACH_COMP_CNTR_OP_SEND.0;
        /// Receives.
        const RECEIVE = ffi::ibv_qp_attach_comp_cntr_op::IBV_QP_ATTACH_COMP_CNTR_OP_RECV.0;
        /// Reads.
        const READ = ffi::ibv_qp_attach_comp_cntr_op::IBV_QP_ATTACH_COMP_CNTR_OP_RDMA_READ.0;
        /// Reads of the peer.
        const REMOTE_READ =
            ffi::ibv_qp_attach_comp_cntr_op::IBV_QP_ATTACH_COMP_CNTR_OP_REMOTE_RDMA_READ.0;
        /// Writes.
        const WRITE = ffi::ibv_qp_attach_comp_cntr_op::IBV_QP_ATTACH_COMP_CNTR_OP_RDMA_WRITE.0;
        /// Writes of the peer.
        const REMOTE_WRITE =
            ffi::ibv_qp_attach_comp_cntr_op::IBV_QP_ATTACH_COMP_CNTR_OP_REMOTE_RDMA_WRITE.0;
    }
}

/// `struct ibv_comp_cntr_caps`: the [`CompletionCounter`]s that a device supports.
#[derive(Clone, Copy, Debug)]
#[doc(alias = "ibv_comp_cntr_caps")]
pub struct CompletionCounterCapabilities(ffi::ibv_comp_cntr_caps);

impl CompletionCounterCapabilities {
    /// The highest value of a counter.
    pub fn max_value(&self) -> u64 {
        self.0.max_value
    }

    /// The number of counters that the device has.
    pub fn max_counters(&self) -> u32 {
        self.0.max_counters
    }

    /// The operations that it can count.
    pub fn operations(&self) -> CountedOperations {
        CountedOperations::from_bits_truncate(self.0.supported_qp_attach_ops)
    }
}

/// `struct ibv_comp_cntr`: counts the successes and the failures of queue pairs' requests. It tells less than a
/// completion queue, and costs less. Since rdma-core 65.
///
/// [`QueuePair::attach_completion_counter`](crate::QueuePair::attach_completion_counter) chooses queue pairs and
/// operations.
///
/// ```no_run
/// # // not on Soft-RoCE alone: it has no counters
/// use ibverbs::completion::{CompletionCounter, CompletionCounterUnit};
///
/// # fn main() -> ibverbs::Result<()> {
/// let context = ibverbs::open("efa_0")?;
/// let counter = CompletionCounter::new(&context, CompletionCounterUnit::Requests)?;
/// assert_eq!((counter.value()?, counter.errors()?), (0, 0));
/// # Ok(())
/// # }
/// ```
#[doc(alias = "ibv_comp_cntr")]
pub struct CompletionCounter<'ctx> {
    raw: Handle<ffi::ibv_comp_cntr>,
    context: ContextRef<'ctx>,
}

resource! {
    /// `ibv_destroy_comp_cntr`: destroys the counter, and reports errors, which dropping cannot.
    ///
    /// # Errors
    ///
    /// The counter is then [leaked](crate::_guide::verbs#when-a-resource-cannot-be-destroyed).
    ///
    ///  - `EBUSY`: a queue pair that it counts still exists.
    #[doc(alias = "ibv_destroy_comp_cntr")]
    CompletionCounter<'ctx>: raw of ibv_comp_cntr, context
}

impl<'ctx> CompletionCounter<'ctx> {
    /// `ibv_create_comp_cntr`: creates a counter at 0.
    ///
    /// # Errors
    ///
    ///  - `EOPNOTSUPP`: the device has no counters, or none of that unit.
    ///  - `ENOMEM`: none left on the device.
    #[doc(alias = "ibv_create_comp_cntr")]
    pub fn new(context: impl Into<ContextRef<'ctx>>, unit: CompletionCounterUnit) -> Result<Self> {
        let context = context.into();
        let mut attributes =
            ffi::ibv_comp_cntr_init_attr { comp_mask: 0, type_: unit.into(), flags: 0 };
        // SAFETY: the context is live; a counter that comes back is ours alone.
        let raw = unsafe {
            let raw = ffi::ibv_create_comp_cntr(context.as_raw(), &mut attributes);
            Handle::new("ibv_create_comp_cntr", raw)
        }?;
        Ok(Self { raw, context })
    }

    /// `ibv_read_comp_cntr`: the count of successes, in the counter's unit.
    ///
    /// # Errors
    ///
    /// For this and the other methods:
    ///
    ///  - `EOPNOTSUPP`: the device cannot do that with such a counter.
    ///  - `EIO`, `ENODEV`: the device is gone.
    #[doc(alias = "ibv_read_comp_cntr")]
    pub fn value(&self) -> Result<u64> {
        self.read("ibv_read_comp_cntr", ffi::ibv_read_comp_cntr)
    }

    /// `ibv_read_err_comp_cntr`: the count of failures.
    ///
    /// # Errors
    ///
    /// Those of [`value`](Self::value).
    #[doc(alias = "ibv_read_err_comp_cntr")]
    pub fn errors(&self) -> Result<u64> {
        self.read("ibv_read_err_comp_cntr", ffi::ibv_read_err_comp_cntr)
    }

    fn read(
        &self,
        verb: &'static str,
        read: unsafe extern "C" fn(*mut ffi::ibv_comp_cntr, *mut u64) -> i32,
    ) -> Result<u64> {
        let mut value = 0;
        // SAFETY: the counter is live and `value` is writable.
        ffi::status(verb, unsafe { read(self.as_raw(), &mut value) })?;
        Ok(value)
    }

    /// `ibv_set_comp_cntr`: sets the count of successes. What the device counts at the same time may be lost.
    ///
    /// # Errors
    ///
    /// Those of [`value`](Self::value), and `EINVAL`: more than
    /// [`max_value`](CompletionCounterCapabilities::max_value).
    #[doc(alias = "ibv_set_comp_cntr")]
    pub fn set_value(&self, value: u64) -> Result<()> {
        // SAFETY: the counter is live.
        ffi::status("ibv_set_comp_cntr", unsafe { ffi::ibv_set_comp_cntr(self.as_raw(), value) })
    }

    /// `ibv_set_err_comp_cntr`: sets the count of failures.
    ///
    /// # Errors
    ///
    /// Those of [`set_value`](Self::set_value).
    #[doc(alias = "ibv_set_err_comp_cntr")]
    pub fn set_errors(&self, value: u64) -> Result<()> {
        // SAFETY: the counter is live.
        let returned = unsafe { ffi::ibv_set_err_comp_cntr(self.as_raw(), value) };
        ffi::status("ibv_set_err_comp_cntr", returned)
    }

    /// `ibv_inc_comp_cntr`: adds to the count of successes.
    ///
    /// # Errors
    ///
    /// Those of [`value`](Self::value).
    #[doc(alias = "ibv_inc_comp_cntr")]
    pub fn add_value(&self, amount: u64) -> Result<()> {
        // SAFETY: the counter is live.
        ffi::status("ibv_inc_comp_cntr", unsafe { ffi::ibv_inc_comp_cntr(self.as_raw(), amount) })
    }

    /// `ibv_inc_err_comp_cntr`: adds to the count of failures.
    ///
    /// # Errors
    ///
    /// Those of [`value`](Self::value).
    #[doc(alias = "ibv_inc_err_comp_cntr")]
    pub fn add_errors(&self, amount: u64) -> Result<()> {
        // SAFETY: the counter is live.
        let returned = unsafe { ffi::ibv_inc_err_comp_cntr(self.as_raw(), amount) };
        ffi::status("ibv_inc_err_comp_cntr", returned)
    }
}

impl Context<'_> {
    /// `ibv_query_comp_cntr_caps`: the completion counters that the device supports. Since rdma-core 65.
    ///
    /// # Errors
    ///
    ///  - `EOPNOTSUPP`: the device, or the kernel, has no completion counters.
    #[doc(alias = "ibv_query_comp_cntr_caps")]
    pub fn query_completion_counters(&self) -> Result<CompletionCounterCapabilities> {
        let mut raw = ffi::ibv_comp_cntr_caps::default();
        // SAFETY: the context is live and `raw` is writable.
        let returned = unsafe { ffi::ibv_query_comp_cntr_caps(self.as_raw(), &mut raw) };
        ffi::status("ibv_query_comp_cntr_caps", returned)?;
        Ok(CompletionCounterCapabilities(raw))
    }
}

debug! { CompletionCounter<'_>, self, raw: self.as_raw(), .. }
