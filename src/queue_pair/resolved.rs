//! The Ethernet address of a GID.

use super::address_vector::AddressVector;
use crate::device::Context;
use crate::error::{Error, Result};
use crate::ffi;

/// The Ethernet address that packets to a GID go to.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct ResolvedEthernet {
    /// The MAC address of the next hop.
    pub mac: [u8; 6],
    /// The VLAN, if the network device has one.
    pub vlan: Option<u16>,
}

impl AddressVector {
    /// `ibv_resolve_eth_l2_from_gid`: finds the Ethernet address that packets of this path go to, as
    /// providers do for address handles. It may send ARP or neighbour solicitations, and waits for the
    /// answer: up to 3 seconds.
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
            // Without libnl, the verb fails without a reason.
            let reason = "resolving Ethernet addresses needs the feature `neigh` of this crate";
            return Err(Error::with_reason(VERB, libc::EOPNOTSUPP, reason));
        }
        let (mut raw, mut mac, mut vlan) = (self.to_raw(), [0; 6], u16::MAX);
        // SAFETY: the context is live, and the arguments are writable, the address for 6 bytes.
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
