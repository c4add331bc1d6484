//! The settings of a device.

use std::net::IpAddr;

use crate::ffi::ibv_mtu;

/// The ports and limits of a device.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    /// Whether it is on a simulated network, instead of a UDP socket.
    pub(crate) is_simulated: bool,
    pub(crate) through_kernel: bool,
    pub(crate) strict: bool,
    /// Whether undefined fields of a failed completion hold misleading values.
    pub(crate) garbles: bool,
    pub(crate) one_sided: bool,
    pub(crate) adapter_gids: bool,
    pub(crate) name: Option<String>,
    /// The addresses of each port, one GID each.
    pub(crate) ports: Vec<Vec<IpAddr>>,
    pub(crate) mtu: ibv_mtu,
    pub(crate) max_mr_size: u64,
    pub(crate) max_registered: u64,
    pub(crate) max_device_memory: u64,
    pub(crate) max_qp: u32,
    pub(crate) max_qp_wr: u32,
    pub(crate) max_sge: u32,
    pub(crate) max_inline: u32,
    pub(crate) max_cq: u32,
    pub(crate) max_cqe: u32,
    pub(crate) max_mr: u32,
    pub(crate) max_mw: u32,
    pub(crate) max_pd: u32,
    pub(crate) max_srq: u32,
    pub(crate) max_srq_wr: u32,
    pub(crate) max_ah: u32,
    pub(crate) max_rd_atomic: u8,
    pub(crate) max_res_rd_atom: u32,
    pub(crate) completion_vectors: u32,
    /// It is as an EFA device, with these `EFADV_DEVICE_ATTR_CAPS_*`.
    pub(crate) efa: Option<u32>,
    /// It has the DC of mlx5.
    #[cfg(feature = "mlx5")]
    pub(crate) has_dc: bool,
}

impl Settings {
    /// A locally administered EUI-64, from the first address that the device was made with.
    pub(crate) fn guid(&self) -> u64 {
        const LOCAL: u64 = 0x0200_0000_0000_0000;
        match self.ports.first().and_then(|port| port.first()) {
            None => LOCAL,
            Some(IpAddr::V4(address)) => {
                let [a, b, c, d] = address.octets();
                u64::from_be_bytes([0x02, 0, a, 0xff, 0xfe, b, c, d])
            }
            Some(IpAddr::V6(address)) => {
                let address = u128::from(*address);
                (address as u64 ^ ((address >> 64) as u64).rotate_left(17)) | LOCAL
            }
        }
    }
}
