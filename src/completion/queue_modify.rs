//! Changing a completion queue: its size, and when it raises events.

use std::time::Duration;

use super::queue::CompletionQueue;
use super::queue_builder::capacity;
use crate::device::{ModerationCapabilities, quirks};
use crate::error::{Error, Result};
use crate::ffi;

const RESIZE: &str = "ibv_resize_cq";

impl CompletionQueue<'_> {
    /// `ibv_resize_cq`: changes the number of completions that the queue has room for, to at least
    /// `entries`. Completions in the queue stay there.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: `entries` is 0, more than the device allows, or less than the number of completions
    ///    in the queue.
    ///  - `EOPNOTSUPP`, `ENOSYS`: the device cannot resize; or its provider may leave the queue without
    ///    memory if this fails (`rxe`, `bnxt_re`, `hfi1verbs`, `ipathverbs`), so that the next poll
    ///    would crash: for those, use [`resize_unchecked`](Self::resize_unchecked).
    ///  - `EBUSY`: another resize is going on.
    ///  - `ENOMEM`: no memory.
    #[doc(alias = "ibv_resize_cq")]
    pub fn resize(&self, entries: u32) -> Result<()> {
        quirks::check_resize(RESIZE, &self.context().query_device()?)?;
        // SAFETY: this provider leaves the queue unchanged if this fails.
        unsafe { self.resize_unchecked(entries) }
    }

    /// [`resize`](Self::resize), on any device, including Soft-RoCE.
    ///
    /// # Errors
    ///
    /// Those of [`resize`](Self::resize).
    ///
    /// # Safety
    ///
    /// If the provider is `rxe`, `hfi1verbs`, `ipathverbs` or `bnxt_re`, and this fails with an error
    /// other than `EINVAL`: no thread uses the queue during or after this call, and with `bnxt_re` the
    /// queue is forgotten ([`std::mem::forget`]), not dropped. `EINVAL` leaves a queue of `rxe`
    /// unchanged.
    #[doc(alias = "ibv_resize_cq")]
    pub unsafe fn resize_unchecked(&self, entries: u32) -> Result<()> {
        let entries = capacity(RESIZE, entries, self.context().query_device()?.max_cqe())?;
        // SAFETY: the queue is live.
        let returned = unsafe { ffi::ibv_resize_cq(self.as_raw(), entries) };
        ffi::status(RESIZE, returned).map_err(|error| match error.errno() {
            // The device supports the number, as was checked, so this is the only cause left.
            libc::EINVAL => {
                Error::holds_more(RESIZE, entries as u32, "completions: poll them first")
            }
            _ => error,
        })
    }

    /// `ibv_modify_cq`: delays the event of an armed queue until it has `count` completions, or until
    /// `period` has passed since the first of them. With zero for both, each event is raised
    /// immediately.
    ///
    /// The device counts in microseconds: a fraction of one is rounded up.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the device does not support values that large; see
    ///    [`DeviceAttributes::moderation`](crate::device::DeviceAttributes::moderation).
    ///  - `EOPNOTSUPP`: the device does not support moderation.
    #[doc(alias = "ibv_modify_cq")]
    #[doc(alias = "ibv_moderate_cq")]
    pub fn moderate(&self, count: u16, period: Duration) -> Result<()> {
        const VERB: &str = "ibv_modify_cq";
        let ModerationCapabilities { max_count, max_period } =
            self.context().query_device()?.moderation();
        let reason = "the device does not moderate completion queues";
        Error::unsupported_if((max_count, max_period) == (0, 0), VERB, reason)?;
        Error::within(VERB, "the number of completions", count, 0, max_count)?;
        let micros = u64::try_from(period.as_nanos().div_ceil(1000)).unwrap_or(u64::MAX);
        Error::within(VERB, "the period in microseconds", micros, 0, max_period)?;
        let cq_period = micros as u16;
        let mut attributes = ffi::ibv_modify_cq_attr {
            attr_mask: ffi::ibv_cq_attr_mask::IBV_CQ_ATTR_MODERATE.0,
            moderate: ffi::ibv_moderate_cq { cq_count: count, cq_period },
        };
        // SAFETY: the queue is live, and the attributes are read only.
        ffi::status(VERB, unsafe { ffi::ibv_modify_cq(self.as_raw(), &mut attributes) })
    }
}
