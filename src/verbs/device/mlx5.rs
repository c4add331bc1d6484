//! mlx5 (feature `mlx5`): ConnectX and BlueField beyond `verbs.h`.

use super::Device;
use super::context::Context;
use crate::base::{Error, Result, debug, direct, ffi};

const VERB: &str = "mlx5dv_query_device";

/// `struct mlx5dv_context`: see [`Context::query_mlx5`].
///
/// The methods concern this crate's queue pairs; [`as_raw`](Self::as_raw) has the rest.
#[derive(Clone, Copy)]
#[doc(alias = "mlx5dv_context")]
pub struct Mlx5Attributes(ffi::mlx5dv_context);

// SAFETY: its pointers to registers are only handed out.
unsafe impl Send for Mlx5Attributes {}
// SAFETY: as above.
unsafe impl Sync for Mlx5Attributes {}

impl Mlx5Attributes {
    fn has(&self, field: ffi::mlx5dv_context_comp_mask) -> bool {
        self.0.comp_mask & u64::from(field.0) != 0
    }

    /// The most streams of a DC initiator, and of failed streams before it fails itself, as powers of two.
    /// `None`: no streams.
    pub fn max_dc_streams(&self) -> Option<(u8, u8)> {
        let caps = self.0.dci_streams_caps;
        let there = self.has(ffi::mlx5dv_context_comp_mask::MLX5DV_CONTEXT_MASK_DCI_STREAMS);
        (there && caps.max_log_num_concurent > 0)
            .then_some((caps.max_log_num_concurent, caps.max_log_num_errored))
    }

    /// How many reads and atomics a DC target answers at a time, if known.
    pub fn max_dc_rd_atom(&self) -> Option<u64> {
        let there = self.has(ffi::mlx5dv_context_comp_mask::MLX5DV_CONTEXT_MASK_MAX_DC_RD_ATOM);
        there.then_some(self.0.max_dc_rd_atom)
    }

    /// How many reads and atomics a DC initiator can have outstanding, if known.
    pub fn max_dc_init_rd_atom(&self) -> Option<u64> {
        let there = self.has(ffi::mlx5dv_context_comp_mask::MLX5DV_CONTEXT_MASK_MAX_DC_RD_ATOM);
        there.then_some(self.0.max_dc_init_rd_atom)
    }

    /// The C struct. A field is valid only if its bit in `comp_mask` is set.
    pub fn as_raw(&self) -> &ffi::mlx5dv_context {
        &self.0
    }
}

impl Device<'_> {
    /// `mlx5dv_is_supported`, `mlx5dv_is_supported(3)`: whether it has DC queue pairs and the other direct
    /// verbs of `mlx5dv.h`.
    #[doc(alias = "mlx5dv_is_supported")]
    pub fn is_mlx5(&self) -> bool {
        // SAFETY: the device is live.
        unsafe { direct::mlx5dv_is_supported(self.as_raw()) }
    }
}

impl Context<'_> {
    /// `mlx5dv_query_device`, `mlx5dv_query_device(3)`: the limits and abilities of an mlx5 device.
    ///
    /// # Errors
    ///
    ///  - `EOPNOTSUPP`: this is no mlx5 device.
    #[doc(alias = "mlx5dv_query_device")]
    pub fn query_mlx5(&self) -> Result<Mlx5Attributes> {
        use ffi::mlx5dv_context_comp_mask as M;

        // In the struct of every release. The provider clears the bits of missing features.
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
        let returned = unsafe { direct::mlx5dv_query_device(self.as_raw(), &mut raw) };
        ffi::status(VERB, returned).map_err(|error| explain(VERB, error))?;
        Ok(Mlx5Attributes(raw))
    }
}

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
