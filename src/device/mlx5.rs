//! mlx5 (feature `mlx5`): what a ConnectX or BlueField can do beyond `verbs.h`.

use super::Device;
use super::context::Context;
use crate::debug::debug;
use crate::error::{Error, Result};
use crate::ffi;

const VERB: &str = "mlx5dv_query_device";

/// `struct mlx5dv_context`: the limits and abilities of an mlx5 device. See [`Context::query_mlx5`].
///
/// Its methods are those that concern the queue pairs of this crate; [`as_raw`](Self::as_raw) has the rest.
#[derive(Clone, Copy)]
#[doc(alias = "mlx5dv_context")]
pub struct Mlx5Attributes(ffi::mlx5dv_context);

// SAFETY: its pointers, to registers of the device, are only handed out, by an unsafe binding.
unsafe impl Send for Mlx5Attributes {}
// SAFETY: as above.
unsafe impl Sync for Mlx5Attributes {}

impl Mlx5Attributes {
    fn has(&self, field: ffi::mlx5dv_context_comp_mask) -> bool {
        self.0.comp_mask & u64::from(field.0) != 0
    }

    /// The most streams that a DC initiator can have, and the most of them that can fail before it fails
    /// itself, both as powers of two. `None`: the device has no streams.
    pub fn max_dc_streams(&self) -> Option<(u8, u8)> {
        let caps = self.0.dci_streams_caps;
        let there = self.has(ffi::mlx5dv_context_comp_mask::MLX5DV_CONTEXT_MASK_DCI_STREAMS);
        (there && caps.max_log_num_concurent > 0)
            .then_some((caps.max_log_num_concurent, caps.max_log_num_errored))
    }

    /// How many reads and atomics a DC target answers at a time, if the device tells.
    pub fn max_dc_rd_atom(&self) -> Option<u64> {
        let there = self.has(ffi::mlx5dv_context_comp_mask::MLX5DV_CONTEXT_MASK_MAX_DC_RD_ATOM);
        there.then_some(self.0.max_dc_rd_atom)
    }

    /// How many reads and atomics a DC initiator can have outstanding, if the device tells.
    pub fn max_dc_init_rd_atom(&self) -> Option<u64> {
        let there = self.has(ffi::mlx5dv_context_comp_mask::MLX5DV_CONTEXT_MASK_MAX_DC_RD_ATOM);
        there.then_some(self.0.max_dc_init_rd_atom)
    }

    /// The C struct. Only those of its fields are valid whose bit is set in its `comp_mask`.
    pub fn as_raw(&self) -> &ffi::mlx5dv_context {
        &self.0
    }
}

impl Device<'_> {
    /// `mlx5dv_is_supported`: whether it is an mlx5 device, which has DC queue pairs and the other direct
    /// verbs of `mlx5dv.h`.
    ///
    /// The man page is `mlx5dv_is_supported(3)`.
    #[doc(alias = "mlx5dv_is_supported")]
    pub fn is_mlx5(&self) -> bool {
        // SAFETY: the device is live.
        unsafe { ffi::mlx5dv_is_supported(self.as_raw()) }
    }
}

impl Context<'_> {
    /// `mlx5dv_query_device`: the limits and abilities that only mlx5 devices have.
    ///
    /// The man page is `mlx5dv_query_device(3)`.
    ///
    /// # Errors
    ///
    ///  - `EOPNOTSUPP`: this is no mlx5 device.
    #[doc(alias = "mlx5dv_query_device")]
    pub fn query_mlx5(&self) -> Result<Mlx5Attributes> {
        use ffi::mlx5dv_context_comp_mask as M;

        // What the methods above show, and what is in the struct in every release. The provider clears the
        // bits of what the device does not have.
        let wanted = M::MLX5DV_CONTEXT_MASK_CQE_COMPRESION
            | M::MLX5DV_CONTEXT_MASK_SWP
            | M::MLX5DV_CONTEXT_MASK_STRIDING_RQ
            | M::MLX5DV_CONTEXT_MASK_TUNNEL_OFFLOADS
            | M::MLX5DV_CONTEXT_MASK_DYN_BFREGS
            | M::MLX5DV_CONTEXT_MASK_CLOCK_INFO_UPDATE
            | M::MLX5DV_CONTEXT_MASK_FLOW_ACTION_FLAGS
            | M::MLX5DV_CONTEXT_MASK_DC_ODP_CAPS
            | M::MLX5DV_CONTEXT_MASK_NUM_LAG_PORTS
            | M::MLX5DV_CONTEXT_MASK_SIGNATURE_OFFLOAD
            | M::MLX5DV_CONTEXT_MASK_DCI_STREAMS
            | M::MLX5DV_CONTEXT_MASK_WR_MEMCPY_LENGTH
            | M::MLX5DV_CONTEXT_MASK_CRYPTO_OFFLOAD
            | M::MLX5DV_CONTEXT_MASK_MAX_DC_RD_ATOM
            | M::MLX5DV_CONTEXT_MASK_REG_C0
            | M::MLX5DV_CONTEXT_MASK_OOO_RECV_WRS;
        let mut raw = ffi::mlx5dv_context { comp_mask: wanted.0.into(), ..Default::default() };
        // SAFETY: the context is live, and `raw` is writable.
        let returned = unsafe { ffi::mlx5dv_query_device(self.as_raw(), &mut raw) };
        ffi::status(VERB, returned).map_err(|error| explain(VERB, error))?;
        Ok(Mlx5Attributes(raw))
    }
}

/// Says why a verb of mlx5 failed on a device of another provider.
#[cold]
pub(crate) fn explain(verb: &'static str, error: Error) -> Error {
    match error.errno() {
        libc::EOPNOTSUPP => Error::with_reason(verb, libc::EOPNOTSUPP, "this is no mlx5 device"),
        _ => error,
    }
}

debug! {
    Mlx5Attributes, self,
    max_dc_streams: self.max_dc_streams(), max_dc_rd_atom: self.max_dc_rd_atom(),
    max_dc_init_rd_atom: self.max_dc_init_rd_atom(), ..
}
