//! What some providers do in another way. libibverbs does not name a device's provider, so vendor and part numbers tell;
//! the software device has its own.

use super::attributes::DeviceAttributes;
use crate::base::{Error, Result};

const RXE: (u32, u32) = (0xff_ffff, 0);

/// `hfi1verbs`, `ipathverbs`.
const QLOGIC: u32 = 0x1175;

/// `bnxt_re`.
const BROADCOM: u32 = 0x14e4;

/// `ocrdma`.
const EMULEX: u32 = 0x10df;

/// `mlx4`, `mlx5`.
const MELLANOX: u32 = 0x02c9;

/// `hns`.
const HUAWEI: u32 = 0x19e5;

/// The provider itself may copy short messages, and results of reads or atomics, to the request's address.
pub(crate) fn copies_results(device: &DeviceAttributes) -> bool {
    matches!(device.vendor_id(), MELLANOX | HUAWEI)
}

/// The provider frees an object when its destroy verb fails, though the kernel keeps it.
pub(super) fn frees_what_it_keeps(device: &DeviceAttributes) -> bool {
    device.vendor_id() == EMULEX
}

pub(crate) fn is_rxe(device: &DeviceAttributes) -> bool {
    (device.vendor_id(), device.vendor_part_id()) == RXE
}

/// The provider may free the queue's memory on failure while other threads use the queue.
pub(crate) fn check_resize(verb: &'static str, device: &DeviceAttributes) -> Result<()> {
    let reason = match device.vendor_id() {
        BROADCOM => "the provider bnxt_re frees the queue if its driver refuses",
        QLOGIC => {
            "the providers hfi1verbs and ipathverbs unmap the queue before they map a new one"
        }
        _ if is_rxe(device) => {
            "the provider rxe unmaps the queue before it maps a new one, which may fail: see \
             resize_unchecked"
        }
        _ => return Ok(()),
    };
    Err(Error::with_reason(verb, libc::EOPNOTSUPP, reason))
}
