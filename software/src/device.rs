//! A device: the C object that libibverbs knows, the engine behind it, and the thread that runs it.

use std::ffi::c_char;
use std::io;
use std::mem::zeroed;
use std::net::{IpAddr, Ipv4Addr};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::JoinHandle;

use ibverbs::Context;

use crate::causes::explained;
use crate::driver::{self, Driver, Locked, Shared};
use crate::ffi::{
    device_hold, device_put, ibv_device, ibv_node_type, ibv_transport_type, verbs_device,
};
use crate::link::clock::RealClock;
use crate::link::udp::UdpLink;
use crate::manager;
use crate::network::{Membership, NetworkLink, Simulation};
use crate::provider::{self, device::RawDevice};
use crate::register;
use crate::settings::Settings;
use crate::threads::without_signals;
use crate::transport::Engine;
use crate::transport::counters::{Counters, PortCounters};

/// An RDMA device made of software, in this process.
///
/// It lives as long as this handle, the contexts that were opened from it, and the device lists that contain
/// it. librdmacm opens the devices that its identifiers use, so their connections go on after the handle is dropped, and no
/// new identifier finds the device. Its thread sleeps when there is nothing to do; a device on a [`Network`](crate::Network) has none.
#[derive(Debug)]
pub struct Device(NonNull<ibv_device>);

// SAFETY: the C object is not modified; its reference count is atomic, and the engine has a lock.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

/// The number in the next device's name.
static NEXT: AtomicU32 = AtomicU32::new(0);

/// Packets go to one machine's address.
///
/// # Errors
///
/// `InvalidInput`: an address is that of no machine, or of many.
pub(crate) fn check_addresses<'a>(all: impl IntoIterator<Item = &'a IpAddr>) -> io::Result<()> {
    let is_one = |ip: &IpAddr| {
        let ip = ip.to_canonical();
        let is_broadcast = matches!(ip, IpAddr::V4(ip) if ip.is_broadcast());
        !(ip.is_unspecified() || ip.is_multicast() || is_broadcast)
    };
    all.into_iter().find(|ip| !is_one(ip)).map_or(Ok(()), |ip| {
        Err(invalid(&format!("{ip} is the address of no one machine, as a device's must be")))
    })
}

pub(crate) fn invalid(reason: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, reason)
}

/// An address of 127.0.0.0/8, but not of 127.0.0.0/16: those are often configured by hand.
fn nth_address(nth: u32) -> Option<IpAddr> {
    let [_, b, c, d] = (0x01_0000 + nth % 0xff_0000).to_be_bytes();
    (d != 0 && d != 255).then(|| IpAddr::V4(Ipv4Addr::new(127, b, c, d)))
}

/// Opens sockets at a free address of 127.0.0.0/8.
fn free_address(through_kernel: bool) -> io::Result<(IpAddr, UdpLink)> {
    /// Another process may try the same addresses.
    const TRIES: u32 = 10_000;
    static TRIED: AtomicU32 = AtomicU32::new(0);
    let start = std::process::id().wrapping_mul(0x9e37_79b9);
    for _ in 0..TRIES {
        let nth = start.wrapping_add(TRIED.fetch_add(1, Ordering::Relaxed));
        let Some(address) = nth_address(nth) else { continue };
        match UdpLink::new(&[address], through_kernel) {
            Ok(link) => return Ok((address, link)),
            Err(e) if e.kind() == io::ErrorKind::AddrInUse => {}
            Err(e) => return Err(e),
        }
    }
    Err(explained("each address of 127.0.0.0/8", &io::ErrorKind::AddrInUse.into()))
}

type Made = (Arc<Shared>, Option<JoinHandle<()>>);

/// A device with sockets and a thread.
fn threaded(mut settings: Settings, name: String) -> io::Result<Made> {
    let mut link = if settings.ports.is_empty() {
        let (address, link) = free_address(settings.through_kernel)?;
        settings.ports.push(vec![address]);
        link
    } else {
        UdpLink::new(&settings.ports.concat(), settings.through_kernel)?
    };
    if settings.one_sided {
        link.open_direct_access()?;
    }
    let driver = Driver::threaded(&link)?;
    let engine = Engine::new(settings, Arc::new(RealClock::new()), Box::new(link));
    let shared = Shared::new(engine, driver);
    let running = shared.clone();
    let thread = std::thread::Builder::new()
        .name(name)
        .spawn(move || without_signals(|| driver::run(&running)))?;
    Ok((shared, Some(thread)))
}

/// A device on a simulated network.
fn simulated(mut settings: Settings, network: &Arc<Simulation>) -> io::Result<Made> {
    let membership = network.join(&mut settings.ports)?;
    let link = Box::new(NetworkLink(membership.clone()));
    let engine = Engine::new(settings, network.clock(), link);
    let shared = Shared::new(engine, Driver::simulated(membership.clone()));
    network.attach(membership.number, &shared);
    Ok((shared, None))
}

impl Device {
    pub(crate) fn make(
        mut settings: Settings,
        network: Option<Arc<Simulation>>,
    ) -> io::Result<Self> {
        let lengths = settings.ports.iter().map(Vec::len);
        if settings.ports.len() > 255 || lengths.clone().any(|n| n == 0 || n > 255) {
            return Err(invalid("a device has 1 to 255 ports, each with 1 to 255 addresses"));
        }
        check_addresses(settings.ports.iter().flatten())?;
        register::install_hooks();
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = settings.name.take().unwrap_or_else(|| format!("soft{number}"));
        // SAFETY: all zeros is a valid value of this C structure, null pointers included.
        let mut verbs: verbs_device = unsafe { zeroed() };
        if name.is_empty() || name.len() >= verbs.device.name.len() || name.contains('\0') {
            return Err(invalid("the name of a device has 1 to 63 bytes, none of them zero"));
        }
        let put = |to: &mut [c_char], text: &str| {
            to.iter_mut().zip(text.bytes()).for_each(|(to, from)| *to = from as c_char);
        };
        put(&mut verbs.device.name, &name);
        // Programs look for a device of the kernel by these. Nothing is there.
        put(&mut verbs.device.dev_name, &name);
        put(&mut verbs.device.dev_path, &format!("/sys/class/infiniband_verbs/{name}"));
        put(&mut verbs.device.ibdev_path, &format!("/sys/class/infiniband/{name}"));
        verbs.device.node_type = ibv_node_type::IBV_NODE_CA;
        verbs.device.transport_type = ibv_transport_type::IBV_TRANSPORT_IB;
        verbs.ops = provider::device_operations();
        let (shared, thread) = match network {
            Some(network) => simulated(settings, &network)?,
            None => {
                threaded(settings, name.clone()).map_err(|error| match error.raw_os_error() {
                    // What an address has to do with it stands in the text.
                    None => error,
                    Some(_) => explained(name, &error),
                })?
            }
        };
        let device = Box::new(RawDevice { verbs, shared, thread, freed: manager::freed });
        let device = NonNull::from(Box::leak(device)).cast();
        // SAFETY: the device is live; it begins with no reference, and this is the handle's.
        unsafe { device_hold(device.as_ptr()) };
        Ok(Self(device))
    }

    pub(crate) fn membership(&self) -> Option<&Arc<Membership>> {
        self.shared().driver().membership()
    }

    fn raw(&self) -> &RawDevice {
        // SAFETY: the handle holds a reference to a device that `make` made.
        unsafe { self.0.cast::<RawDevice>().as_ref() }
    }

    /// Opens the device, which need not be registered.
    ///
    /// # Errors
    ///
    /// `EMFILE`, `ENFILE`, `ENOMEM`: the system is out of files or memory.
    pub fn open(&self) -> ibverbs::Result<Context<'static>> {
        // SAFETY: the handle holds the device through the call, and the context takes a reference of its own.
        unsafe { ibverbs::provider::open(self.0) }
    }

    /// Makes [`ibverbs::devices`] list the device, and [`ibverbs::open`] find it by its name, for as long as
    /// this handle lives. Returns the handle.
    ///
    /// Registered devices come before the machine's own, in the order of their registration.
    pub fn register(&self) -> &Self {
        register::add(self.0);
        manager::added(self.raw().shared());
        self
    }

    /// Its name, such as `soft0`.
    pub fn name(&self) -> String {
        let name = &self.raw().verbs.device.name;
        name.iter().take_while(|&&c| c != 0).map(|&c| char::from(c as u8)).collect()
    }

    /// Its first address, which GID 0 of port 1 represents, unless the table of GIDs is [an adapter's](crate::Builder::adapter_gids).
    pub fn address(&self) -> IpAddr {
        self.lock().core.ports[0].addresses[0]
    }

    /// The device as C sees it, which is valid for as long as this handle lives.
    pub fn as_raw(&self) -> *mut ibv_device {
        self.0.as_ptr()
    }

    pub(crate) fn shared(&self) -> &Shared {
        &self.raw().shared
    }

    pub(crate) fn lock(&self) -> Locked<'_> {
        self.shared().lock()
    }

    /// Counts of packets and retries since it was created.
    pub fn counters(&self) -> Counters {
        self.lock().core.counters()
    }

    /// Counts of each port.
    pub fn port_counters(&self) -> Vec<PortCounters> {
        self.lock().core.ports.iter().map(|port| port.counters).collect()
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        register::remove(self.0);
        manager::forgotten(self.shared());
        // SAFETY: the reference that `make` took is given back once.
        unsafe { device_put(self.0.as_ptr()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Wherever a process begins, the next addresses are good ones.
    #[test]
    fn addresses_are_found_from_every_start() {
        for start in (0..1 << 24).step_by(4093).chain([u32::MAX - 100, u32::MAX]) {
            let found = (0..10).filter_map(|i| nth_address(start.wrapping_add(i)));
            let found: Vec<IpAddr> = found.collect();
            assert!(found.len() >= 8, "{start:#x}: {found:?}");
            let first = Ipv4Addr::new(127, 1, 0, 1);
            assert!(found.iter().all(|&address| address >= IpAddr::V4(first)), "{found:?}");
        }
    }
}
