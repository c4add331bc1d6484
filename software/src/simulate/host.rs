//! One host of a simulation.

use std::fmt;
use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinHandle;

use super::hosts::{Inner, address};
use super::process::Process;
use super::streams::{SimulatedListener, SimulatedStream};
use crate::device::Device;
use crate::network::{Conditions, nanoseconds};

/// A host of a [simulation](super::simulate()): a runtime of tokio's, with devices, a clock, and an address.
///
/// A clone is another handle of the same host. [`World::host`](super::World::host) makes one.
#[derive(Clone)]
pub struct Host {
    pub(super) world: Arc<Inner>,
    pub(super) number: usize,
}

impl Host {
    /// The name that it was made with.
    pub fn name(&self) -> String {
        self.world.state().hosts[self.number].name.clone()
    }

    /// Its address for streams, which is that of its first device too.
    pub fn address(&self) -> IpAddr {
        address(self.number)
    }

    /// Makes a device of this host, with the next free of its 254 addresses.
    ///
    /// # Errors
    ///
    /// Those of [`Builder::build`](crate::Builder::build).
    pub fn device(&self) -> io::Result<Device> {
        let IpAddr::V4(first) = self.address() else { unreachable!("hosts have IPv4 addresses") };
        let first = first.to_bits();
        let mut made = Err(io::Error::from(io::ErrorKind::AddrInUse));
        for address in first..first + 254 {
            let address = std::net::Ipv4Addr::from_bits(address).into();
            made = Device::builder().network(&self.world.network).address(address).build();
            match &made {
                Err(e) if e.kind() == io::ErrorKind::AddrInUse => {}
                Err(_) => break,
                Ok(device) => {
                    self.world.add_device(self.number, device);
                    break;
                }
            }
        }
        made
    }

    /// Runs a program on this host. What it spawns by [`tokio::spawn`] runs there, too.
    ///
    /// If it panics, the [simulation](super::simulate()) does. The handle tells its result, and that the host has
    /// [crashed](Self::crash): awaiting it gives an error that says it was cancelled.
    pub fn start<T: Send + 'static>(
        &self,
        program: impl Future<Output = T> + Send + 'static,
    ) -> JoinHandle<T> {
        let running = self.world.state().hosts[self.number].process.clone();
        let process = running.unwrap_or_else(|| {
            let process = Arc::new(Process::new(self.world.clock(self.number), self.world.now()));
            self.world.state().hosts[self.number].process = Some(process.clone());
            process
        });
        let host = self.clone();
        process.runtime().spawn(async move {
            let _watch = Watch(host);
            program.await
        })
    }

    /// Ends everything that runs on this host, as if the machine had lost its power: from now on, its devices and streams send
    /// nothing, and its tasks are dropped as soon as the caller waits. Peers of its streams are told so.
    ///
    /// [`start`](Self::start) then begins anew, with new devices of the same addresses. What is to outlast a crash, such as
    /// the contents of a disk, is in variables that the programs share with the caller of `simulate`.
    pub fn crash(&self) {
        self.world.crash(self.number);
    }

    /// Listens for streams at this host's address.
    ///
    /// # Errors
    ///
    /// `AddrInUse`: it listens at this port already.
    pub fn listen(&self, port: u16) -> io::Result<SimulatedListener> {
        SimulatedListener::new(&self.world, self.number, port)
    }

    /// Connects a stream to a host that listens. If the two are cut off from each other, it waits until they are not.
    ///
    /// # Errors
    ///
    /// - `AddrNotAvailable`: no host has this address.
    /// - `ConnectionRefused`: the host does not listen at this port.
    /// - `ConnectionAborted`: this host has crashed.
    pub async fn connect(&self, (to, port): (IpAddr, u16)) -> io::Result<SimulatedStream> {
        let hosts = self.world.state().hosts.len();
        let to = (0..hosts).find(|&host| address(host) == to);
        let to = to.ok_or(io::ErrorKind::AddrNotAvailable)?;
        SimulatedStream::connect(self.world.clone(), self.number, to, port).await
    }

    /// Cuts this host off from another, in both directions: packets are lost, and what streams send waits.
    ///
    /// Does nothing for a host of another simulation; so do [`heal`](Self::heal) and
    /// [`set_conditions_to`](Self::set_conditions_to).
    pub fn partition(&self, other: &Self) {
        self.set_cut(other, true);
    }

    /// Ends a partition.
    pub fn heal(&self, other: &Self) {
        self.set_cut(other, false);
    }

    fn set_cut(&self, other: &Self, is_cut: bool) {
        if Arc::ptr_eq(&self.world, &other.world) {
            self.world.set_cut(self.number, other.number, is_cut);
            self.world.set_cut(other.number, self.number, is_cut);
        }
    }

    /// Changes how packets from this host to another are treated: a slow link, or one that loses much. Streams have its delay
    /// and jitter.
    pub fn set_conditions_to(&self, other: &Self, conditions: Conditions) {
        if Arc::ptr_eq(&self.world, &other.world) {
            self.world.set_between(self.number, other.number, conditions);
        }
    }

    /// The value of the host's clock. [`tokio::time`] goes by it on this host.
    pub fn now(&self) -> Duration {
        Duration::from_nanos(self.world.clock(self.number).shows(self.world.now()))
    }

    /// Sets the host's clock forward by `ahead`, but not past 292 years, and lets it be fast by this many millionths, or slow
    /// if that is negative.
    /// `ahead` changes what [`now`](Self::now) tells; timers go by the difference of two times.
    pub fn set_clock(&self, ahead: Duration, millionths: i32) {
        let now = self.world.now();
        self.world.clock(self.number).set(now, nanoseconds(ahead), millionths);
    }
}

impl fmt::Debug for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Host").field("name", &self.name()).finish_non_exhaustive()
    }
}

/// Sees whether a program panics.
struct Watch(Host);

impl Drop for Watch {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let name = self.0.name();
            self.0.world.state().failed.get_or_insert(name);
        }
    }
}
