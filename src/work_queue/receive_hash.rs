//! The hash that chooses the work queue of a packet.

use crate::debug::debug;
use crate::device::ReceiveScalingCapabilities;
use crate::error::{Error, Result};
use crate::ffi;

const VERB: &str = "ibv_create_qp";

bitflags::bitflags! {
    /// `enum ibv_rx_hash_fields`: the fields of a packet's headers that are hashed.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
    #[doc(alias = "ibv_rx_hash_fields")]
    pub struct ReceiveHashFields: u64 {
        /// The source of IPv4.
        const SOURCE_IPV4 = ffi::ibv_rx_hash_fields::IBV_RX_HASH_SRC_IPV4.0 as u64;
        /// The destination of IPv4.
        const DESTINATION_IPV4 = ffi::ibv_rx_hash_fields::IBV_RX_HASH_DST_IPV4.0 as u64;
        /// The source of IPv6.
        const SOURCE_IPV6 = ffi::ibv_rx_hash_fields::IBV_RX_HASH_SRC_IPV6.0 as u64;
        /// The destination of IPv6.
        const DESTINATION_IPV6 = ffi::ibv_rx_hash_fields::IBV_RX_HASH_DST_IPV6.0 as u64;
        /// The source port of TCP.
        const SOURCE_PORT_TCP = ffi::ibv_rx_hash_fields::IBV_RX_HASH_SRC_PORT_TCP.0 as u64;
        /// The destination port of TCP.
        const DESTINATION_PORT_TCP = ffi::ibv_rx_hash_fields::IBV_RX_HASH_DST_PORT_TCP.0 as u64;
        /// The source port of UDP.
        const SOURCE_PORT_UDP = ffi::ibv_rx_hash_fields::IBV_RX_HASH_SRC_PORT_UDP.0 as u64;
        /// The destination port of UDP.
        const DESTINATION_PORT_UDP = ffi::ibv_rx_hash_fields::IBV_RX_HASH_DST_PORT_UDP.0 as u64;
        /// The security parameters index of IPsec.
        const IPSEC_SPI = ffi::ibv_rx_hash_fields::IBV_RX_HASH_IPSEC_SPI.0 as u64;
        /// The fields are those of the inner headers of a tunnel.
        const INNER = ffi::ibv_rx_hash_fields::IBV_RX_HASH_INNER.0 as u64;
        const _ = !0;
    }
}

/// `struct ibv_rx_hash_conf`: how a [`ReceiveScalingQueuePair`](crate::work_queue::ReceiveScalingQueuePair) hashes
/// packets: with Toeplitz's function, the only one that devices have.
#[derive(Clone, PartialEq, Eq)]
#[doc(alias = "ibv_rx_hash_conf")]
pub struct ReceiveHash {
    key: Vec<u8>,
    fields: ReceiveHashFields,
}

impl ReceiveHash {
    /// Toeplitz's hash of these fields with this key. mlx4 and mlx5 take keys of 40 bytes.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the key is empty or longer than 255 bytes; no field is named; or fields of both IPv4
    ///    and IPv6, or of both TCP and UDP, are.
    pub fn toeplitz(key: impl Into<Vec<u8>>, fields: ReceiveHashFields) -> Result<Self> {
        use ReceiveHashFields as F;

        let key = key.into();
        Error::within(VERB, "the length of the hash's key", key.len() as u64, 1, u8::MAX)?;
        Error::invalid_if(fields.difference(F::INNER).is_empty(), VERB, "the hash has no fields")?;
        let both = |a: F, b: F| fields.intersects(a) && fields.intersects(b);
        if both(F::SOURCE_IPV4 | F::DESTINATION_IPV4, F::SOURCE_IPV6 | F::DESTINATION_IPV6) {
            return Err(Error::invalid(VERB, "one hash cannot have fields of both IPv4 and IPv6"));
        }
        if both(
            F::SOURCE_PORT_TCP | F::DESTINATION_PORT_TCP,
            F::SOURCE_PORT_UDP | F::DESTINATION_PORT_UDP,
        ) {
            return Err(Error::invalid(VERB, "one hash cannot have ports of both TCP and UDP"));
        }
        Ok(Self { key, fields })
    }

    /// The fields that are hashed.
    pub fn fields(&self) -> ReceiveHashFields {
        self.fields
    }

    /// Compares it with what a device can do.
    pub(super) fn check(&self, device: &ReceiveScalingCapabilities) -> Result<()> {
        let function = ffi::ibv_rx_hash_function_flags::IBV_RX_HASH_FUNC_TOEPLITZ.0;
        let reason = "the device does not have Toeplitz's hash function";
        Error::unsupported_if(u32::from(device.rx_hash_function) & function == 0, VERB, reason)?;
        let reason = "the device cannot hash one of the fields: see \
                          DeviceAttributes::receive_scaling";
        Error::unsupported_if(self.fields.bits() & !device.rx_hash_fields_mask != 0, VERB, reason)?;
        Ok(())
    }

    /// The C struct, which points to the key. C reads it only.
    pub(super) fn to_raw(&self) -> ffi::ibv_rx_hash_conf {
        ffi::ibv_rx_hash_conf {
            rx_hash_function: ffi::ibv_rx_hash_function_flags::IBV_RX_HASH_FUNC_TOEPLITZ.0 as u8,
            // `toeplitz` has checked that it fits.
            rx_hash_key_len: self.key.len() as u8,
            rx_hash_key: self.key.as_ptr().cast_mut(),
            rx_hash_fields_mask: self.fields.bits(),
        }
    }
}

// Without the key: who knows it can direct all packets to one queue.
debug! { ReceiveHash, self, fields: self.fields, .. }
