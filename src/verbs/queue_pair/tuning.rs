//! What else a queue pair can be told and asked: options of its vendor, its rate, and the order of its data.

use super::QueuePair;
use super::address_vector::AddressVector;
use super::extended_operations::WorkRequestOpcode;
use super::transport::Transport;
use crate::base::{Error, Result, ffi};
use crate::verbs::device::Context;

/// `struct ibv_ece`: options that two devices of one vendor agree on while they connect.
///
/// One side sends the result of [`QueuePair::query_ece`]. The other passes it to [`QueuePair::set_ece`], and answers
/// with what it accepted.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[doc(alias = "ibv_ece")]
pub struct EnhancedConnection {
    /// The vendor that defines the options.
    pub vendor_id: u32,
    /// The options in the vendor's encoding; 0 for none.
    pub options: u32,
}

/// `struct ibv_qp_rate_limit_attr`: how fast a queue pair may send.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[doc(alias = "ibv_qp_rate_limit_attr")]
pub struct RateLimit {
    /// Kilobits per second; 0 for no limit.
    pub rate: u32,
    /// The largest burst, in bytes; 0 for the device's default.
    pub max_burst: u32,
    /// The usual packet size in bytes, which makes the rate more exact; 0 for the device's default.
    pub typical_packet: u16,
}

bitflags::bitflags! {
    /// `enum ibv_query_qp_data_in_order_caps`: the result of [`QueuePair::data_in_order`].
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
    #[doc(alias = "ibv_query_qp_data_in_order_caps")]
    pub struct DataInOrder: u32 {
        /// When the last byte of a message is in memory, all of it is.
        const WHOLE_MESSAGE =
            ffi::ibv_query_qp_data_in_order_caps::IBV_QUERY_QP_DATA_IN_ORDER_WHOLE_MSG.0;
        /// The device writes each aligned block of 128 bytes in order.
        const ALIGNED_128_BYTES =
            ffi::ibv_query_qp_data_in_order_caps::IBV_QUERY_QP_DATA_IN_ORDER_ALIGNED_128_BYTES.0;
    }
}

impl<T: Transport> QueuePair<'_, T> {
    /// `ibv_query_ece`: the options that the queue pair offers or has accepted.
    ///
    /// # Errors
    ///
    ///  - `EOPNOTSUPP`: the device has no ECE.
    #[doc(alias = "ibv_query_ece")]
    pub fn query_ece(&self) -> Result<EnhancedConnection> {
        let mut raw = ffi::ibv_ece::default();
        // SAFETY: the queue pair is live and `raw` is writable.
        let returned = unsafe { ffi::ibv_query_ece(self.as_raw(), &mut raw) };
        ffi::status("ibv_query_ece", returned)?;
        Ok(EnhancedConnection { vendor_id: raw.vendor_id, options: raw.options })
    }

    /// `ibv_set_ece`: sets the options to connect with, in RESET or INIT.
    ///
    /// # Errors
    ///
    ///  - `EOPNOTSUPP`: the device has no ECE; or the vendor is 0: the peer offers no options.
    ///  - `EINVAL`: the options are another vendor's, or unknown.
    #[doc(alias = "ibv_set_ece")]
    pub fn set_ece(&mut self, ece: EnhancedConnection) -> Result<()> {
        let EnhancedConnection { vendor_id, options } = ece;
        let mut raw = ffi::ibv_ece { vendor_id, options, comp_mask: 0 };
        // SAFETY: the queue pair is live and `raw` is writable.
        ffi::status("ibv_set_ece", unsafe { ffi::ibv_set_ece(self.as_raw(), &mut raw) })
    }

    /// `ibv_modify_qp_rate_limit`: limits the rate at which a queue pair in RTS sends.
    ///
    /// # Errors
    ///
    ///  - `EOPNOTSUPP`: the device has no packet pacing.
    ///  - `EINVAL`: the device does not support these values, or the queue pair is not in RTS.
    #[doc(alias = "ibv_modify_qp_rate_limit")]
    pub fn modify_rate_limit(&mut self, limit: RateLimit) -> Result<()> {
        let mut raw = ffi::ibv_qp_rate_limit_attr {
            rate_limit: limit.rate,
            max_burst_sz: limit.max_burst,
            typical_pkt_sz: limit.typical_packet,
            comp_mask: 0,
        };
        // SAFETY: the queue pair is live and `raw` is a valid struct without extensions.
        let returned = unsafe { ffi::ibv_modify_qp_rate_limit(self.as_raw(), &mut raw) };
        ffi::status("ibv_modify_qp_rate_limit", returned)
    }

    /// `ibv_query_qp_data_in_order`: the order in which the device writes an operation's data. An empty set guarantees
    /// nothing.
    #[doc(alias = "ibv_query_qp_data_in_order")]
    pub fn data_in_order(&self, operation: WorkRequestOpcode) -> DataInOrder {
        use ffi::ibv_query_qp_data_in_order_flags as query;

        let flags = query::IBV_QUERY_QP_DATA_IN_ORDER_RETURN_CAPS.0;
        // SAFETY: the queue pair is live; the verb accepts any number as operation.
        let found =
            unsafe { ffi::ibv_query_qp_data_in_order(self.as_raw(), operation.into(), flags) };
        DataInOrder::from_bits_truncate(u32::try_from(found).unwrap_or(0))
    }
}

/// The Ethernet address to which packets for a GID go.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct ResolvedEthernet {
    /// The MAC address of the next hop.
    pub mac: [u8; 6],
    /// The VLAN, if the network device has one.
    pub vlan: Option<u16>,
}

impl AddressVector {
    /// `ibv_resolve_eth_l2_from_gid`: finds the Ethernet address to which packets of this path go. It may send ARP or
    /// neighbour solicitations, and blocks up to 3 seconds.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: our GID or the peer's is not an IP address.
    ///  - `EHOSTUNREACH`: no host answers, or there is no route.
    ///  - `EOPNOTSUPP`: the crate was built without feature `neigh`.
    #[doc(alias = "ibv_resolve_eth_l2_from_gid")]
    pub fn resolve_ethernet(&self, context: &Context<'_>) -> Result<ResolvedEthernet> {
        const VERB: &str = "ibv_resolve_eth_l2_from_gid";
        if cfg!(not(any(feature = "neigh", feature = "system"))) {
            // Without libnl, the verb gives no reason.
            let reason = "resolving Ethernet addresses needs the feature `neigh` of this crate";
            return Err(Error::with_reason(VERB, libc::EOPNOTSUPP, reason));
        }
        let (mut raw, mut mac, mut vlan) = (self.to_raw(), [0; 6], u16::MAX);
        // SAFETY: the context is live; all arguments are writable, the address for 6 bytes.
        let returned = unsafe {
            ffi::ibv_resolve_eth_l2_from_gid(
                context.as_raw(),
                &mut raw,
                mac.as_mut_ptr(),
                &mut vlan,
            )
        };
        ffi::status(VERB, returned)?;
        Ok(ResolvedEthernet { mac, vlan: Some(vlan).filter(|vlan| *vlan <= 0xfff) })
    }
}
