//! The rate limit of a queue pair.

use super::QueuePair;
use super::transport::Transport;
use crate::error::Result;
use crate::ffi;

/// `struct ibv_qp_rate_limit_attr`: how fast a queue pair may send.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[doc(alias = "ibv_qp_rate_limit_attr")]
pub struct RateLimit {
    /// The rate in kilobits per second; 0 for no limit.
    pub rate: u32,
    /// The largest burst in bytes; 0 for the device's default.
    pub max_burst: u32,
    /// The usual size of a packet in bytes, for a more exact rate; 0 for the device's default.
    pub typical_packet: u16,
}

impl<T: Transport> QueuePair<'_, T> {
    /// `ibv_modify_qp_rate_limit`: limits the rate at which the queue pair sends; it must be in RTS.
    ///
    /// # Errors
    ///
    ///  - `EOPNOTSUPP`: the device has no packet pacing.
    ///  - `EINVAL`: the device does not support that rate, burst or packet size, or the queue pair is not
    ///    in RTS.
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
}
