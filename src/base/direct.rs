//! The direct verbs of EFA and mlx5 that this crate calls: a device of software answers them by its
//! [`hooks`](super::hooks), and the provider for every other device.

use std::ffi::c_int;

use super::ffi;
use super::hooks::{DirectVerbs, hooks};

#[inline]
fn verbs() -> Option<&'static DirectVerbs> {
    Some(&hooks()?.direct)
}

/// # Safety
///
/// As for the C function, here and below.
#[cfg(feature = "efa")]
pub(crate) unsafe fn efadv_query_device(
    context: *mut ffi::ibv_context,
    attributes: &mut ffi::efadv_device_attr,
) -> c_int {
    let (to, size) = (std::ptr::from_mut(attributes), size_of_val(attributes) as u32);
    // SAFETY: the caller vouches for the context.
    let answer = verbs().and_then(|verbs| unsafe { (verbs.efa_query_device)(context, to.cast()) });
    // SAFETY: as above.
    answer.unwrap_or_else(|| unsafe { ffi::efadv_query_device(context, to, size) })
}

/// # Safety
///
/// As above.
#[cfg(feature = "efa")]
pub(crate) unsafe fn efadv_query_ah(
    handle: *mut ffi::ibv_ah,
    attributes: &mut ffi::efadv_ah_attr,
) -> c_int {
    let (to, size) = (std::ptr::from_mut(attributes), size_of_val(attributes) as u32);
    // SAFETY: the caller vouches for the handle.
    let answer = verbs().and_then(|verbs| unsafe { (verbs.efa_query_ah)(handle, to.cast()) });
    // SAFETY: as above.
    answer.unwrap_or_else(|| unsafe { ffi::efadv_query_ah(handle, to, size) })
}

/// # Safety
///
/// As above.
#[cfg(feature = "efa")]
pub(crate) unsafe fn efadv_create_qp_ex(
    context: *mut ffi::ibv_context,
    attributes: *mut ffi::ibv_qp_init_attr_ex,
    direct: &mut ffi::efadv_qp_init_attr,
) -> *mut ffi::ibv_qp {
    let (of_efa, size) = (std::ptr::from_mut(direct), size_of_val(direct) as u32);
    // SAFETY: the caller vouches for the context and the attributes.
    let answer = verbs()
        .and_then(|verbs| unsafe { (verbs.efa_create_qp)(context, attributes, of_efa.cast()) });
    // SAFETY: as above.
    answer.unwrap_or_else(|| unsafe { ffi::efadv_create_qp_ex(context, attributes, of_efa, size) })
}

/// # Safety
///
/// As above.
#[cfg(feature = "mlx5")]
pub(crate) unsafe fn mlx5dv_is_supported(device: *mut ffi::ibv_device) -> bool {
    // SAFETY: the caller vouches for the device.
    verbs().is_some_and(|verbs| unsafe { (verbs.mlx5_is_supported)(device) })
        // SAFETY: as above.
        || unsafe { ffi::mlx5dv_is_supported(device) }
}

/// # Safety
///
/// As above.
#[cfg(feature = "mlx5")]
pub(crate) unsafe fn mlx5dv_query_device(
    context: *mut ffi::ibv_context,
    attributes: *mut ffi::mlx5dv_context,
) -> c_int {
    // SAFETY: the caller vouches for the context and the attributes.
    let answer =
        verbs().and_then(|verbs| unsafe { (verbs.mlx5_query_device)(context, attributes.cast()) });
    // SAFETY: as above.
    answer.unwrap_or_else(|| unsafe { ffi::mlx5dv_query_device(context, attributes) })
}

/// # Safety
///
/// As above.
#[cfg(feature = "mlx5")]
pub(crate) unsafe fn mlx5dv_create_qp(
    context: *mut ffi::ibv_context,
    attributes: *mut ffi::ibv_qp_init_attr_ex,
    direct: *mut ffi::mlx5dv_qp_init_attr,
) -> *mut ffi::ibv_qp {
    // SAFETY: the caller vouches for the context and the attributes.
    let answer = verbs()
        .and_then(|verbs| unsafe { (verbs.mlx5_create_qp)(context, attributes, direct.cast()) });
    // SAFETY: as above.
    answer.unwrap_or_else(|| unsafe { ffi::mlx5dv_create_qp(context, attributes, direct) })
}

/// # Safety
///
/// As above.
#[cfg(feature = "mlx5")]
#[inline]
pub(crate) unsafe fn mlx5dv_qp_ex_from_ibv_qp_ex(
    queue_pair: *mut ffi::ibv_qp_ex,
) -> *mut ffi::mlx5dv_qp_ex {
    // SAFETY: the caller vouches for the queue pair.
    let answer = verbs().and_then(|verbs| unsafe { (verbs.mlx5_qp_ex)(queue_pair) });
    // SAFETY: as above.
    answer.map_or_else(|| unsafe { ffi::mlx5dv_qp_ex_from_ibv_qp_ex(queue_pair) }, |it| it.cast())
}
