//! A device for programs that are to run anywhere.

use std::io;
use std::net::IpAddr;

use crate::device::Device;

/// What chooses.
const VARIABLE: &str = "IBVERBS_SOFTWARE";

/// Makes and registers a device if this machine has no RDMA device, and says so in a line on the standard
/// error output. Keep what it returns for as long as the device is to be listed.
///
/// The environment variable `IBVERBS_SOFTWARE` chooses otherwise: `never`; `always`, beside the devices that
/// there are; or the IP addresses to be at, separated by commas, which also means always.
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
        "always" => (Device::new()?, "as IBVERBS_SOFTWARE says"),
        // What cannot be listed cannot be used either.
        "" if ibverbs::devices().is_ok_and(|devices| !devices.is_empty()) => return Ok(None),
        "" => (Device::new()?, "this machine has no RDMA device"),
        addresses => {
            let parse = |address: &str| address.trim().parse::<IpAddr>();
            let addresses = addresses.split(',').map(parse).collect::<Result<Vec<_>, _>>();
            let reason = "IBVERBS_SOFTWARE is never, always, or IP addresses with commas between";
            let addresses =
                addresses.map_err(|_| io::Error::new(io::ErrorKind::InvalidInput, reason))?;
            (Device::builder().port(addresses).build()?, "as IBVERBS_SOFTWARE says")
        }
    };
    device.register();
    eprintln!("using {} at {}, made of software: {why}", device.name(), device.address());
    Ok(Some(device))
}
