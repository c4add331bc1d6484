//! Quirks of single providers, recognised by the vendor and part numbers of their devices: libibverbs does not tell a program
//! which provider serves a device. The device of software has numbers of its own, so no quirk of an adapter applies to it.

use super::attributes::DeviceAttributes;
use crate::error::{Error, Result};

/// The vendor and the model of the kernel's Soft-RoCE.
const RXE: (u32, u32) = (0xff_ffff, 0);

/// The vendor of devices of the providers `hfi1verbs` and `ipathverbs`: an OUI of QLogic.
const QLOGIC: u32 = 0x1175;

/// The vendor of devices of the provider `bnxt_re`.
const BROADCOM: u32 = 0x14e4;

/// The vendor of devices of the provider `ocrdma`: Emulex.
const EMULEX: u32 = 0x10df;

/// The vendor of devices of the providers `mlx4` and `mlx5`.
const MELLANOX: u32 = 0x02c9;

/// Whether the provider may copy a short message, or the result of a read or an atomic, to its destination
/// itself, by the address that the request names.
pub(crate) fn copies_results(device: &DeviceAttributes) -> bool {
    device.vendor_id() == MELLANOX
}

/// Whether the provider frees an object whose destroy verb fails, though the kernel keeps it.
pub(super) fn frees_what_it_keeps(device: &DeviceAttributes) -> bool {
    device.vendor_id() == EMULEX
}

/// Whether the device is the kernel's Soft-RoCE.
pub(crate) fn is_rxe(device: &DeviceAttributes) -> bool {
    (device.vendor_id(), device.vendor_part_id()) == RXE
}

/// Refuses to resize a queue whose provider may free the queue's memory when a resize fails. Other
/// threads may poll it or post to it at that very moment, so the crate could not repair it afterwards.
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
