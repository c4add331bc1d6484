//! Indirection tables.

use std::{fmt, ptr};

use super::work_queue::WorkQueue;
use crate::device::Context;
use crate::error::{Error, Result};
use crate::ffi;
use crate::handle::{Handle, object, resource};
use crate::parent::Parent;

object!(ibv_rwq_ind_table, ibv_destroy_rwq_ind_table);

const VERB: &str = "ibv_create_rwq_ind_table";

/// `struct ibv_rwq_ind_table`: a list of work queues, over which a
/// [`ReceiveScalingQueuePair`](crate::work_queue::ReceiveScalingQueuePair) spreads packets.
#[doc(alias = "ibv_rwq_ind_table")]
pub struct IndirectionTable<'res> {
    raw: Handle<ffi::ibv_rwq_ind_table>,
    queues: Vec<Parent<'res, WorkQueue<'res>>>,
}

resource! {
    /// `ibv_destroy_rwq_ind_table`: destroys the table and reports a failure. Dropping ignores a failure.
    ///
    /// # Errors
    ///
    /// The table is then [leaked](crate::_guide::verbs#when-a-resource-cannot-be-destroyed), with its queues.
    ///
    ///  - `EBUSY`: a queue pair that uses it still exists (because it was leaked, or could not be
    ///    destroyed).
    #[doc(alias = "ibv_destroy_rwq_ind_table")]
    IndirectionTable<'res>: raw of ibv_rwq_ind_table, queues
}

impl<'res> IndirectionTable<'res> {
    /// `ibv_create_rwq_ind_table`: creates a table of these queues, in this order. Their number is a power
    /// of two; a queue may stand in the table more than once.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: there are no queues, their number is not a power of two or more than the device allows
    ///    ([`ReceiveScalingCapabilities::max_rwq_indirection_table_size`](crate::device::ReceiveScalingCapabilities::max_rwq_indirection_table_size)),
    ///    or they belong to different contexts.
    ///  - `EOPNOTSUPP`, `ENOSYS`: the device has no such tables.
    ///  - `ENOMEM`: the device has none left.
    #[doc(alias = "ibv_create_rwq_ind_table")]
    pub fn new<Q: Into<Parent<'res, WorkQueue<'res>>>>(
        queues: impl IntoIterator<Item = Q>,
    ) -> Result<Self> {
        let mut list = queues.into_iter().map(Into::into);
        let Some(first) = list.next() else {
            return Err(Error::invalid(VERB, "there are no work queues"));
        };
        let context = first.protection_domain().context().as_raw();
        let device = first.protection_domain().context().query_device()?;
        let most = device.receive_scaling().max_rwq_indirection_table_size;
        let mut queues = vec![first];
        // One more than there may be, of a list that may be endless.
        queues.extend(list.take(most as usize));
        Error::within(VERB, "the number of work queues", queues.len() as u64, 1, most)?;
        let reason = "the number of work queues is not a power of two";
        Error::invalid_if(!queues.len().is_power_of_two(), VERB, reason)?;
        let other = |queue: &WorkQueue<'_>| queue.protection_domain().context().as_raw() != context;
        let reason = "the work queues belong to different contexts";
        Error::invalid_if(queues.iter().any(|queue| other(queue)), VERB, reason)?;
        let mut raw: Vec<*mut ffi::ibv_wq> = queues.iter().map(|queue| queue.as_raw()).collect();
        let mut attributes = ffi::ibv_rwq_ind_table_init_attr {
            log_ind_tbl_size: raw.len().trailing_zeros(),
            ind_tbl: raw.as_mut_ptr(),
            comp_mask: 0,
        };
        // SAFETY: the context and the queues are live, and kept; the list has as many entries as the
        // attributes say; a table that comes back is ours alone.
        let raw = unsafe {
            Handle::new(
                VERB,
                ffi::ibv_create_rwq_ind_table(context, ptr::from_mut(&mut attributes)),
            )
        }?;
        Ok(Self { raw, queues })
    }

    /// Its queues.
    pub fn work_queues(&self) -> impl ExactSizeIterator<Item = &WorkQueue<'res>> {
        self.queues.iter().map(|queue| &**queue)
    }

    /// Its number.
    pub fn number(&self) -> i32 {
        // SAFETY: the table is live.
        unsafe { (*self.as_raw()).ind_tbl_num }
    }

    /// The context that it was created on.
    pub fn context(&self) -> &Context<'res> {
        self.queues[0].protection_domain().context()
    }
}

impl fmt::Debug for IndirectionTable<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.queues.iter().map(|queue| queue.number())).finish()
    }
}
