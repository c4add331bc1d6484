//! mlx5 (feature `mlx5`): queue pairs whose requests set memory keys, and what the provider knows of its objects.

use std::ptr::NonNull;

use super::address_vector::AddressHandle;
use super::builder::QueuePairBuilder;
use super::extended_operations::{SendOperations, function};
use super::shared_receive_queue::SharedReceiveQueue;
use super::transport::{Rc, Transport};
use super::{QueuePair, dc_options, ffi};
use crate::base::{Handle, Result, direct};
use crate::verbs::completion::CompletionQueue;
use crate::verbs::device::mlx5::explain;
use crate::verbs::domain::ProtectionDomain;
use crate::verbs::memory::DeviceMemory;

impl QueuePairBuilder<'_, Rc> {
    /// `MLX5DV_QP_EX_WITH_MR_LIST`: as [`extended`](Self::extended) with these operations (at least one), and with
    /// [`Batch::set_memory_key`](crate::operation::Batch::set_memory_key). A key's list is inline data: 16 bytes for
    /// each piece ([`max_inline_data`](Self::max_inline_data)).
    ///
    /// Building fails with `EOPNOTSUPP` if the device is not mlx5, or has no such keys.
    #[doc(alias = "MLX5DV_QP_EX_WITH_MR_LIST")]
    pub fn extended_with_memory_keys(mut self, operations: SendOperations) -> Self {
        self.memory_keys = true;
        self.extended(operations)
    }
}

/// # Safety
///
/// `context` is live, as is all that the attributes name.
pub(super) unsafe fn create(
    context: *mut ffi::ibv_context,
    attributes: &mut ffi::ibv_qp_init_attr_ex,
) -> Result<Handle<ffi::ibv_qp>> {
    let direct = ffi::mlx5dv_qp_init_attr {
        comp_mask: ffi::mlx5dv_qp_init_attr_mask::MLX5DV_QP_INIT_ATTR_MASK_SEND_OPS_FLAGS.0.into(),
        send_ops_flags: ffi::mlx5dv_qp_create_send_ops_flags::MLX5DV_QP_EX_WITH_MR_LIST.0.into(),
        ..Default::default()
    };
    // SAFETY: the caller vouches for the context and the attributes; a queue pair that comes back is ours alone.
    unsafe { Handle::new(dc_options::CREATE, dc_options::create(context, attributes, direct)) }
        .map_err(|error| explain(dc_options::CREATE, error))
}

/// # Safety
///
/// The queue pair is live; with memory keys, `create` has made it.
pub(super) unsafe fn functions(queue_pair: NonNull<ffi::ibv_qp_ex>, memory_keys: bool) -> u64 {
    // SAFETY: the caller vouches for it.
    let there = memory_keys && unsafe { (*extended(queue_pair)).wr_mr_list.is_some() };
    if there { function::SET_MEMORY_KEY } else { 0 }
}

/// # Safety
///
/// The queue pair is of mlx5.
unsafe fn extended(queue_pair: NonNull<ffi::ibv_qp_ex>) -> *mut ffi::mlx5dv_qp_ex {
    // SAFETY: the caller vouches for it: this is a cast.
    unsafe { direct::mlx5dv_qp_ex_from_ibv_qp_ex(queue_pair.as_ptr()) }
}

impl<T: Transport> QueuePair<'_, T> {
    /// `mlx5dv_qp_ex_from_ibv_qp_ex`: the C object of mlx5's posting interface, if this is an mlx5 device and the queue
    /// pair has the extended interface.
    #[doc(alias = "mlx5dv_qp_ex_from_ibv_qp_ex")]
    pub fn as_raw_mlx5(&self) -> Option<NonNull<ffi::mlx5dv_qp_ex>> {
        // SAFETY: the context is live.
        let of_mlx5 = unsafe {
            let context = self.protection_domain().context().as_raw();
            direct::mlx5dv_is_supported((*context).device)
        };
        // SAFETY: the queue pair is of an mlx5 device.
        let raw = self.as_raw_extended().filter(|_| of_mlx5).map(|raw| unsafe { extended(raw) });
        raw.and_then(NonNull::new)
    }
}

macro_rules! known {
    ($($(#[$meta:meta])* $object:ty $(, $transport:ident)?: $field:ident = $kind:ident, $raw:ident $(, $mask:expr)?;)+) => {$(
        impl$(<$transport: Transport>)? $object {
            /// `mlx5dv_init_obj`: what mlx5 knows of the object, as C struct: numbers, and addresses of queues and
            /// doorbells. They are valid while the object is; optional fields only if their bit is set in `comp_mask`.
            $(#[$meta])*
            ///
            /// # Errors
            ///
            ///  - `EOPNOTSUPP`: this is no mlx5 device.
            #[doc(alias = "mlx5dv_init_obj")]
            pub fn query_mlx5(&self) -> Result<ffi::$raw> {
                const VERB: &str = "mlx5dv_init_obj";
                let mut out = ffi::$raw::default();
                $(out.comp_mask = { use ffi::*; $mask.0.into() };)?
                let mut object = ffi::mlx5dv_obj::default();
                object.$field.in_ = self.as_raw();
                object.$field.out = &mut out;
                let kind = ffi::mlx5dv_obj_type::$kind;
                // SAFETY: the object is live, and `out` is writable.
                let returned = unsafe { ffi::mlx5dv_init_obj(&mut object, kind.0.into()) };
                ffi::status(VERB, returned).map_err(|error| explain(VERB, error))?;
                Ok(out)
            }
        }
    )+};
}

known! {
    QueuePair<'_, T>, T: qp = MLX5DV_OBJ_QP, mlx5dv_qp, mlx5dv_qp_comp_mask(7);
    /// After it the program polls the queue by itself: destroying a queue pair leaves its completions in it.
    CompletionQueue<'_>: cq = MLX5DV_OBJ_CQ, mlx5dv_cq;
    SharedReceiveQueue<'_>: srq = MLX5DV_OBJ_SRQ, mlx5dv_srq, mlx5dv_srq_comp_mask::MLX5DV_SRQ_MASK_SRQN;
    DeviceMemory<'_>: dm = MLX5DV_OBJ_DM, mlx5dv_dm, mlx5dv_dm_comp_mask::MLX5DV_DM_MASK_REMOTE_VA;
    AddressHandle<'_>: ah = MLX5DV_OBJ_AH, mlx5dv_ah;
    ProtectionDomain<'_>: pd = MLX5DV_OBJ_PD, mlx5dv_pd;
}
