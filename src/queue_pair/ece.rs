//! Enhanced connection establishment (ECE).

use super::QueuePair;
use super::transport::Transport;
use crate::error::Result;
use crate::ffi;

/// `struct ibv_ece`: options that two devices of one vendor agree on while they connect.
///
/// Before connecting, one side sends the result of [`QueuePair::query_ece`] to the other. The other side
/// passes it to [`QueuePair::set_ece`] of its queue pair, and answers with the options that it accepted.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[doc(alias = "ibv_ece")]
pub struct EnhancedConnection {
    /// The vendor that defines the options.
    pub vendor_id: u32,
    /// The options, as the vendor defines them; 0 if there are none.
    pub options: u32,
}

impl<T: Transport> QueuePair<'_, T> {
    /// `ibv_query_ece`: the options that the queue pair has, or has accepted.
    ///
    /// # Errors
    ///
    ///  - `EOPNOTSUPP`: the device does not have this.
    #[doc(alias = "ibv_query_ece")]
    pub fn query_ece(&self) -> Result<EnhancedConnection> {
        let mut raw = ffi::ibv_ece::default();
        // SAFETY: the queue pair is live and `raw` is writable.
        let returned = unsafe { ffi::ibv_query_ece(self.as_raw(), &mut raw) };
        ffi::status("ibv_query_ece", returned)?;
        Ok(EnhancedConnection { vendor_id: raw.vendor_id, options: raw.options })
    }

    /// `ibv_set_ece`: sets the options to connect with. The queue pair must be in the RESET or INIT state.
    ///
    /// # Errors
    ///
    ///  - `EOPNOTSUPP`: the device does not support this; or the vendor is 0, which means that the peer
    ///    offers no options.
    ///  - `EINVAL`: the options are another vendor's, or unknown.
    #[doc(alias = "ibv_set_ece")]
    pub fn set_ece(&mut self, ece: EnhancedConnection) -> Result<()> {
        let EnhancedConnection { vendor_id, options } = ece;
        let mut raw = ffi::ibv_ece { vendor_id, options, comp_mask: 0 };
        // SAFETY: the queue pair is live and `raw` is writable.
        ffi::status("ibv_set_ece", unsafe { ffi::ibv_set_ece(self.as_raw(), &mut raw) })
    }
}
