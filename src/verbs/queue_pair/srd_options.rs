//! The options of an SRD queue pair, and the verb that creates one.

use crate::base::{direct, ffi};

pub(super) const CREATE: &str = "efadv_create_qp_ex";

/// `struct efadv_qp_init_attr`: the options of an SRD queue pair. See [`QueuePairBuilder::srd`](crate::QueuePairBuilder::srd).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[doc(alias = "efadv_qp_init_attr")]
pub struct SrdOptions {
    /// Writes with an immediate from a peer consume no receive (they do, unless set). The device needs
    /// [`EfaCapabilities::UNSOLICITED_WRITE_RECEIVE`](crate::device::EfaCapabilities::UNSOLICITED_WRITE_RECEIVE),
    /// and the completion queue must be one of `efadv_create_cq` ([`ffi`]) that can mark completions without
    /// request.
    #[doc(alias = "EFADV_QP_FLAGS_UNSOLICITED_WRITE_RECV")]
    pub unsolicited_write_receive: bool,
    /// The service level of all traffic (0: the device's default).
    pub service_level: u8,
}

impl SrdOptions {
    /// The C struct.
    pub fn to_raw(self) -> ffi::efadv_qp_init_attr {
        let flags = ffi::EFADV_QP_FLAGS_UNSOLICITED_WRITE_RECV as u16;
        ffi::efadv_qp_init_attr {
            driver_qp_type: ffi::EFADV_QP_DRIVER_TYPE_SRD,
            flags: if self.unsolicited_write_receive { flags } else { 0 },
            sl: self.service_level,
            ..Default::default()
        }
    }
}

/// # Safety
///
/// `context` is live, as is all that `attributes` names.
pub(super) unsafe fn create(
    context: *mut ffi::ibv_context,
    attributes: &mut ffi::ibv_qp_init_attr_ex,
    options: SrdOptions,
) -> *mut ffi::ibv_qp {
    let mut raw = options.to_raw();
    // SAFETY: the caller vouches for the context and the attributes.
    unsafe { direct::efadv_create_qp_ex(context, attributes, &mut raw) }
}
