//! EFA (feature `efa`): Elastic Fabric Adapters beyond `verbs.h`.

use super::context::Context;
use crate::base::{Error, Result, debug, direct, ffi, getters};

const VERB: &str = "efadv_query_device";

bitflags::bitflags! {
    /// `EFADV_DEVICE_ATTR_CAPS_*`: abilities of some EFA devices.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
    pub struct EfaCapabilities: u32 {
        /// SRD queue pairs can read the peer's memory.
        const RDMA_READ = ffi::EFADV_DEVICE_ATTR_CAPS_RDMA_READ;
        /// An SRD queue pair can limit how often a send is repeated while the peer has no receive
        /// ([`max_rnr_retries`](crate::QueuePairBuilder::max_rnr_retries)).
        const RNR_RETRY = ffi::EFADV_DEVICE_ATTR_CAPS_RNR_RETRY;
        /// A receive's completion can tell the GID of a sender without an address handle here
        /// (`efadv_create_cq`, in [`ffi`]).
        const CQ_WITH_SGID = ffi::EFADV_DEVICE_ATTR_CAPS_CQ_WITH_SGID;
        /// SRD queue pairs can write to the peer's memory, also with an immediate.
        const RDMA_WRITE = ffi::EFADV_DEVICE_ATTR_CAPS_RDMA_WRITE;
        /// Writes with an immediate need no receive: see
        /// [`SrdOptions::unsolicited_write_receive`](crate::queue_pair::SrdOptions::unsolicited_write_receive).
        const UNSOLICITED_WRITE_RECEIVE = ffi::EFADV_DEVICE_ATTR_CAPS_UNSOLICITED_WRITE_RECV;
        // Later releases define more.
        const _ = !0;
    }
}

/// `struct efadv_device_attr`: see [`Context::query_efa`].
#[derive(Clone, Copy)]
#[doc(alias = "efadv_device_attr")]
pub struct EfaAttributes(ffi::efadv_device_attr);

impl EfaAttributes {
    getters! { self,
        /// The most requests in a send queue.
        max_send_wr: u32 => self.0.max_sq_wr;

        /// The most requests in a receive queue.
        max_recv_wr: u32 => self.0.max_rq_wr;

        /// The most gather elements of a send.
        max_send_sge: u32 => self.0.max_sq_sge.into();

        /// The most scatter elements of a receive.
        max_recv_sge: u32 => self.0.max_rq_sge.into();

        /// The most inline bytes of a send.
        max_inline_data: u32 => self.0.inline_buf_size.into();

        /// The most bytes of one read or write; 0 if the device has neither. For *messages* see
        /// [`PortAttributes::max_message_size`](crate::device::PortAttributes::max_message_size).
        max_rdma_size: u32 => self.0.max_rdma_size;

        /// The device's capabilities.
        capabilities: EfaCapabilities => EfaCapabilities::from_bits_retain(self.0.device_caps);

        /// The C struct.
        as_raw: &ffi::efadv_device_attr => &self.0;
    }
}

impl Context<'_> {
    /// `efadv_query_device`, `efadv_query_device(3)`: the limits and abilities of an EFA device. Its error
    /// tells other devices apart.
    ///
    /// # Errors
    ///
    ///  - `EOPNOTSUPP`: this is no EFA device.
    ///  - `EIO`, `ENODEV`: the device is gone.
    #[doc(alias = "efadv_query_device")]
    pub fn query_efa(&self) -> Result<EfaAttributes> {
        let mut raw = ffi::efadv_device_attr::default();
        // SAFETY: the context is live.
        let returned = unsafe { direct::efadv_query_device(self.as_raw(), &mut raw) };
        ffi::status(VERB, returned).map_err(|error| explain(VERB, error))?;
        Ok(EfaAttributes(raw))
    }
}

#[cold]
pub(crate) fn explain(verb: &'static str, error: Error) -> Error {
    match error.errno() {
        libc::EOPNOTSUPP => Error::with_reason(verb, libc::EOPNOTSUPP, "this is no EFA device"),
        _ => error,
    }
}

debug! {
    EfaAttributes, self,
    max_send_wr: self.max_send_wr(), max_recv_wr: self.max_recv_wr(),
    max_send_sge: self.max_send_sge(), max_recv_sge: self.max_recv_sge(),
    max_inline_data: self.max_inline_data(), max_rdma_size: self.max_rdma_size(),
    capabilities: self.capabilities()
}
