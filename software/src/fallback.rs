//! A device for programs that run on any machine.

use std::io;
use std::net::IpAddr;

use crate::device::Device;

/// The environment variable that chooses the device.
const VARIABLE: &str = "IBVERBS_SOFTWARE";

/// Creates and registers a device if this machine has no RDMA device, and prints a line about it on standard
/// error. Keep the returned device for as long as it should be listed.
///
/// The environment variable `IBVERBS_SOFTWARE` overrides this: `never`; `always`, in addition to existing
/// devices; or the IP addresses of the device, separated by commas, which implies `always`.
///
/// ```
/// let software = ibverbs_software::register_if_none()?;
/// let devices = ibverbs::devices()?;
/// assert!(!devices.is_empty());
/// # drop(software);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
///
/// Those of [`Builder::build`](crate::Builder::build); `InvalidInput` also if the variable is none of those.
pub fn register_if_none() -> io::Result<Option<Device>> {
    let choice = std::env::var(VARIABLE).unwrap_or_default();
    let (device, why) = match choice.as_str() {
        "never" => return Ok(None),
        "always" => (Device::new().map_err(explained)?, "as IBVERBS_SOFTWARE says"),
        // Devices that cannot be listed cannot be used either.
        "" if ibverbs::devices().is_ok_and(|devices| !devices.is_empty()) => return Ok(None),
        "" => (Device::new().map_err(explained)?, "this machine has no RDMA device"),
        addresses => {
            let parse = |address: &str| address.trim().parse::<IpAddr>();
            let addresses = addresses.split(',').map(parse).collect::<Result<Vec<_>, _>>();
            let reason = "IBVERBS_SOFTWARE is never, always, or IP addresses with commas between";
            let addresses =
                addresses.map_err(|_| io::Error::new(io::ErrorKind::InvalidInput, reason))?;
            (
                Device::builder().port(addresses).build().map_err(explained)?,
                "as IBVERBS_SOFTWARE says",
            )
        }
    };
    device.register();
    eprintln!("using {} at {}, made of software: {why}", device.name(), device.address());
    Ok(Some(device))
}

/// The usual cause of an address in use.
fn explained(error: io::Error) -> io::Error {
    if error.kind() != io::ErrorKind::AddrInUse {
        return error;
    }
    let reason = "no device made of software: UDP port 4791 is in use, by another program or by the \
                  kernel's Soft-RoCE (module rdma_rxe), which takes it on all addresses";
    io::Error::new(error.kind(), reason)
}
