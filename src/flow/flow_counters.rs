//! Counters of flows.

use std::ptr;

use crate::debug::debug;
use crate::device::Context;
use crate::error::{Error, Result};
use crate::ffi;
use crate::foreign_enum::foreign_enum;
use crate::handle::{Handle, object, resource};
use crate::parent::Parent;

object!(ibv_counters, ibv_destroy_counters);

const ATTACH: &str = "ibv_attach_counters_point_flow";
const READ: &str = "ibv_read_counters";

foreign_enum! {
    /// `enum ibv_counter_description`: what a counter counts.
    #[doc(alias = "ibv_counter_description")]
    pub enum Counter: ibv_counter_description(u32) {
        /// Packets.
        Packets = IBV_COUNTER_PACKETS,
        /// Bytes.
        Bytes = IBV_COUNTER_BYTES,
    }
}

/// `struct ibv_counters`: counters of the packets of flows.
///
/// On mlx5 the counters are attached first, and then a flow is created that
/// [counts](crate::flow::Rule::count) with them.
///
/// ```no_run
/// # // not on Soft-RoCE alone: it has no flows
/// use ibverbs::flow::{Counter, Counters, Rule};
///
/// # fn main() -> ibverbs::Result<()> {
/// let context = ibverbs::open("mlx5_0")?;
/// let counters = Counters::new(&context)?;
/// counters.attach(Counter::Packets, 0)?;
/// counters.attach(Counter::Bytes, 1)?;
/// let rule = Rule::sniffer(1).count(&counters);
/// let mut values = [0; 2];
/// counters.read(&mut values)?;
/// # Ok(())
/// # }
/// ```
#[doc(alias = "ibv_counters")]
pub struct Counters<'ctx> {
    raw: Handle<ffi::ibv_counters>,
    context: Parent<'ctx, Context<'ctx>>,
}

resource! {
    /// `ibv_destroy_counters`: destroys the counters and reports a failure. Dropping ignores a failure.
    ///
    /// # Errors
    ///
    /// The counters are then [leaked](crate::_guide::verbs#when-a-resource-cannot-be-destroyed), with their context.
    ///
    ///  - `EBUSY`: a flow that counts with them still exists.
    #[doc(alias = "ibv_destroy_counters")]
    Counters<'ctx>: raw of ibv_counters, context
}

impl<'ctx> Counters<'ctx> {
    /// `ibv_create_counters`: creates an empty set of counters.
    ///
    /// # Errors
    ///
    ///  - `EOPNOTSUPP`, `ENOSYS`: the device has no counters of flows.
    ///  - `ENOMEM`: the device has none left.
    #[doc(alias = "ibv_create_counters")]
    pub fn new(context: impl Into<Parent<'ctx, Context<'ctx>>>) -> Result<Self> {
        let context = context.into();
        let mut attributes = ffi::ibv_counters_init_attr::default();
        // SAFETY: the context is live; counters that come back are ours alone.
        let raw = unsafe {
            let raw = ffi::ibv_create_counters(context.as_raw(), &mut attributes);
            Handle::new("ibv_create_counters", raw)
        }?;
        Ok(Self { raw, context })
    }

    /// `ibv_attach_counters_point_flow`: adds a counter for flows that are created later. The values that
    /// are [read](Self::read) have it at `index`.
    ///
    /// # Errors
    ///
    ///  - `EOPNOTSUPP`: the device does not count that.
    ///  - `EBUSY`: a flow counts with the set already.
    ///  - `EINVAL`: the device has no such index.
    ///  - `ENOMEM`: out of memory.
    #[doc(alias = "ibv_attach_counters_point_flow")]
    pub fn attach(&self, counter: Counter, index: u32) -> Result<()> {
        // SAFETY: without a flow nothing else is referred to.
        unsafe { self.attach_raw(counter, index, ptr::null_mut()) }
    }

    /// # Safety
    ///
    /// `flow` is null, or live for as long as the counters are attached to it.
    pub(super) unsafe fn attach_raw(
        &self,
        counter: Counter,
        index: u32,
        flow: *mut ffi::ibv_flow,
    ) -> Result<()> {
        let mut attributes =
            ffi::ibv_counter_attach_attr { counter_desc: counter.into(), index, comp_mask: 0 };
        // SAFETY: the counters are live, and the caller vouches for the flow.
        let returned =
            unsafe { ffi::ibv_attach_counters_point_flow(self.as_raw(), &mut attributes, flow) };
        ffi::status(ATTACH, returned)
    }

    /// `ibv_read_counters`: reads the counters at the first indices, as many as `values` has.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: `values` is empty, no flow counts with the set yet, or the device has fewer counters.
    ///  - `EIO`, `ENODEV`: the device is gone.
    #[doc(alias = "ibv_read_counters")]
    pub fn read(&self, values: &mut [u64]) -> Result<()> {
        self.read_with(values, 0)
    }

    /// `ibv_read_counters`: as [`read`](Self::read), but takes values that the driver has read before, if it
    /// has.
    ///
    /// # Errors
    ///
    /// Those of [`read`](Self::read).
    #[doc(alias = "ibv_read_counters")]
    pub fn read_cached(&self, values: &mut [u64]) -> Result<()> {
        self.read_with(values, ffi::ibv_read_counters_flags::IBV_READ_COUNTERS_ATTR_PREFER_CACHED.0)
    }

    fn read_with(&self, values: &mut [u64], flags: u32) -> Result<()> {
        Error::within(READ, "the number of values", values.len() as u64, 1, u32::MAX)?;
        let count = values.len() as u32;
        // SAFETY: the counters are live, and the values are writable.
        let returned =
            unsafe { ffi::ibv_read_counters(self.as_raw(), values.as_mut_ptr(), count, flags) };
        ffi::status(READ, returned)
    }

    /// The context that they were created on.
    pub fn context(&self) -> &Context<'ctx> {
        &self.context
    }
}

debug! { Counters<'_>, self, device: self.context.name(), .. }
