//! The options of a DC queue pair, its verb, and the attributes on its way up.

use super::attributes::AttributeMask;
use crate::base::{QueuePairState, direct, ffi};

pub(super) const CREATE: &str = "mlx5dv_create_qp";

/// `struct mlx5dv_dci_streams`: the streams of a DC initiator. See
/// [`QueuePairBuilder::dc_streams`](crate::QueuePairBuilder::dc_streams).
///
/// The device carries out the requests of one stream in order. Those of different streams may overtake each other, and
/// an error of one does not stop the others.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[doc(alias = "mlx5dv_dci_streams")]
pub struct DcStreams {
    /// The base-2 logarithm of the number of streams that the device handles at a time.
    pub log_concurrent: u8,
    /// The base-2 logarithm of the number of streams that can fail before the queue pair itself does.
    pub log_errored: u8,
}

pub(super) fn initiator(streams: Option<DcStreams>) -> ffi::mlx5dv_qp_init_attr {
    use ffi::mlx5dv_qp_init_attr_mask as mask;

    let mut raw = ffi::mlx5dv_qp_init_attr {
        comp_mask: mask::MLX5DV_QP_INIT_ATTR_MASK_DC.0.into(),
        ..Default::default()
    };
    raw.dc_init_attr.dc_type = ffi::mlx5dv_dc_type::MLX5DV_DCTYPE_DCI;
    if let Some(DcStreams { log_concurrent, log_errored }) = streams {
        raw.comp_mask |= u64::from(mask::MLX5DV_QP_INIT_ATTR_MASK_DCI_STREAMS.0);
        raw.dc_init_attr.__bindgen_anon_1.dci_streams = ffi::mlx5dv_dci_streams {
            log_num_concurent: log_concurrent,
            log_num_errored: log_errored,
        };
    }
    raw
}

pub(super) fn target(access_key: u64) -> ffi::mlx5dv_qp_init_attr {
    use ffi::mlx5dv_qp_init_attr_mask as mask;

    let mut raw = ffi::mlx5dv_qp_init_attr {
        comp_mask: mask::MLX5DV_QP_INIT_ATTR_MASK_DC.0.into(),
        ..Default::default()
    };
    raw.dc_init_attr.dc_type = ffi::mlx5dv_dc_type::MLX5DV_DCTYPE_DCT;
    raw.dc_init_attr.__bindgen_anon_1.dct_access_key = access_key;
    raw
}

/// # Safety
///
/// `context` is live, as is all that the attributes name.
pub(super) unsafe fn create(
    context: *mut ffi::ibv_context,
    attributes: &mut ffi::ibv_qp_init_attr_ex,
    mut direct: ffi::mlx5dv_qp_init_attr,
) -> *mut ffi::ibv_qp {
    // The provider sometimes fails without an errno value.
    ffi::set_errno(0);
    // SAFETY: the caller vouches for the context and the attributes.
    unsafe { direct::mlx5dv_create_qp(context, attributes, &mut direct) }
}

pub(super) fn initiator_attributes(from: QueuePairState, to: QueuePairState) -> AttributeMask {
    use AttributeMask as A;
    use QueuePairState as S;

    match (from, to) {
        (S::Reset, S::Init) => A::PKEY_INDEX | A::PORT,
        (S::Init, S::ReadyToReceive) => A::PATH_MTU,
        (S::ReadyToReceive, S::ReadyToSend) => {
            A::ACK_TIMEOUT
                | A::MAX_ACK_RETRIES
                | A::MAX_RNR_RETRIES
                | A::MAX_RD_ATOMIC
                | A::SEND_PSN
        }
        _ => A::empty(),
    }
}

/// Up to RTR.
pub(super) fn target_attributes(from: QueuePairState, to: QueuePairState) -> AttributeMask {
    use AttributeMask as A;
    use QueuePairState as S;

    match (from, to) {
        (S::Reset, S::Init) => A::PKEY_INDEX | A::PORT | A::ACCESS,
        (S::Init, S::ReadyToReceive) => A::MIN_RNR_TIMER | A::PATH | A::PATH_MTU,
        _ => A::empty(),
    }
}
