//! The settings of a device.

use std::io;
use std::net::IpAddr;

use ibverbs::settings::MaximumTransferUnit;

use crate::device::Device;
use crate::ffi::ibv_mtu;
use crate::network::Network;
use crate::settings::Settings;

/// The most queue pairs, and the most shared receive queues: their numbers have 16 bits of index.
const MOST_NUMBERS: u32 = 65_000;

#[cfg(not(feature = "efa"))]
#[doc(hidden)]
#[diagnostic::on_unimplemented(
    message = "this method needs feature `efa` of `ibverbs-software`",
    label = "add `efa` to the features of `ibverbs-software` in Cargo.toml"
)]
pub trait FeatureEfa {}

#[cfg(not(feature = "mlx5"))]
#[doc(hidden)]
#[diagnostic::on_unimplemented(
    message = "this method needs feature `mlx5` of `ibverbs-software`",
    label = "add `mlx5` to the features of `ibverbs-software` in Cargo.toml"
)]
pub trait FeatureMlx5 {}

impl Network {
    /// Makes a device on this network, with the next free address of 10.0.0.0/8.
    ///
    /// # Errors
    ///
    /// Those of [`Builder::build`].
    pub fn device(&self) -> io::Result<Device> {
        Builder::new().network(self).build()
    }
}

impl Device {
    /// Makes a device with one port, at a free address of 127.0.0.0/8.
    ///
    /// # Errors
    ///
    /// Those of [`Builder::build`].
    pub fn new() -> io::Result<Self> {
        Self::builder().build()
    }

    /// Configures a device: addresses, ports, limits.
    pub fn builder() -> Builder {
        Builder::new()
    }
}

/// Makes a [`Device`].
///
/// ```
/// let device = ibverbs_software::Device::builder().address("127.0.77.1".parse()?).max_sge(4).build()?;
/// assert_eq!(device.address().to_string(), "127.0.77.1");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
#[must_use]
pub struct Builder {
    pub(crate) settings: Settings,
    network: Option<Network>,
    mtu: Option<MaximumTransferUnit>,
}

macro_rules! limit_methods {
    ($($(#[$doc:meta])* $name:ident: $type:ty => $field:ident;)*) => {
        impl Builder {
            $($(#[$doc])*
            pub fn $name(mut self, most: $type) -> Self {
                self.settings.$field = most;
                self
            })*
        }
    };
}

limit_methods! {
    /// The longest memory region, in bytes; the default is 2^40.
    max_mr_size: u64 => max_mr_size;
    /// The most bytes in all memory regions together, as `RLIMIT_MEMLOCK` limits them on hardware: registering more
    /// fails with `ENOMEM`. Without limit if not set.
    max_registered_memory: u64 => max_registered;
    /// The bytes of device memory; the default is 256 KiB.
    max_device_memory: u64 => max_device_memory;
    /// The most queue pairs at a time; the default is 65,000, which is also the maximum.
    max_qp: u32 => max_qp;
    /// The most work requests in a queue of a queue pair; 16,384 if not set.
    max_qp_wr: u32 => max_qp_wr;
    /// The most elements in the list of a work request; 16 if not set.
    max_sge: u32 => max_sge;
    /// The most inline data, in bytes; 256 if not set. A queue pair that asks for less gets a multiple of 64, and 64 at the
    /// least, as adapters round up.
    max_inline_data: u32 => max_inline;
    /// The most completion queues at a time; 65,536 if not set.
    max_cq: u32 => max_cq;
    /// The most completions in a completion queue; 4,194,303 if not set, as adapters have. They take memory only when they are
    /// there.
    max_cqe: u32 => max_cqe;
    /// The most memory regions at a time; 65,536 if not set.
    max_mr: u32 => max_mr;
    /// The most memory windows at a time; 65,536 if not set.
    max_mw: u32 => max_mw;
    /// The most protection domains at a time; 65,536 if not set.
    max_pd: u32 => max_pd;
    /// The most shared receive queues at a time; the default is 65,000, which is also the maximum.
    max_srq: u32 => max_srq;
    /// The most receives in a shared receive queue; 16,384 if not set.
    max_srq_wr: u32 => max_srq_wr;
    /// The most address handles at a time; 65,536 if not set.
    max_ah: u32 => max_ah;
    /// The most outstanding READ and atomic requests, in each direction of a queue pair; 16 if not set.
    max_rd_atomic: u8 => max_rd_atomic;
    /// The most outstanding READ and atomic requests that all queue pairs answer together (`max_dest_rd_atomic`): another
    /// one fails with `ENOMEM` on its way to RTR. 16 Mi if not set, which is enough for all.
    max_res_rd_atom: u32 => max_res_rd_atom;
    /// The number of completion vectors, which have no effect. The default is 1.
    completion_vectors: u32 => completion_vectors;
}

impl Builder {
    pub(crate) fn new() -> Self {
        Self {
            settings: Settings {
                is_simulated: false,
                through_kernel: false,
                strict: cfg!(debug_assertions),
                garbles: true,
                one_sided: false,
                adapter_gids: false,
                name: None,
                ports: Vec::new(),
                mtu: ibv_mtu::IBV_MTU_1024,
                max_mr_size: 1 << 40,
                max_registered: u64::MAX,
                max_device_memory: 256 << 10,
                max_qp: MOST_NUMBERS,
                max_qp_wr: 16_384,
                max_sge: 16,
                max_inline: 256,
                max_cq: 65_536,
                max_cqe: (4 << 20) - 1,
                max_mr: 65_536,
                max_mw: 65_536,
                max_pd: 65_536,
                max_srq: MOST_NUMBERS,
                max_srq_wr: 16_384,
                max_ah: 65_536,
                max_rd_atomic: 16,
                max_res_rd_atom: 16 << 20,
                completion_vectors: 1,
                efa: None,
                #[cfg(feature = "mlx5")]
                has_dc: false,
            },
            network: None,
            mtu: None,
        }
    }

    /// The device's name, of at most 63 bytes; `soft0`, `soft1` .. if not set.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.settings.name = Some(name.into());
        self
    }

    /// Puts the device on a simulated network, instead of a UDP socket. Its addresses are then arbitrary; without
    /// any port, it has one port with the network's next free address of 10.0.0.0/8. Such a device has no thread,
    /// and its time is the network's.
    pub fn network(mut self, network: &Network) -> Self {
        self.settings.is_simulated = true;
        self.network = Some(network.clone());
        self
    }

    /// Whether packets to and from other software devices of this machine pass through the kernel too, as those of
    /// other machines do: `tcpdump` then shows them, and rules for the network interface apply to them. Unless set, they
    /// go from device to device, within the process, or in memory that two processes of one user share. Of two devices,
    /// one with this setting is enough.
    pub fn through_kernel(mut self, through_kernel: bool) -> Self {
        self.settings.through_kernel = through_kernel;
        self
    }

    /// Whether the device looks for sends and writes whose data the program has changed between the post and the
    /// completion: hardware may send the old data or the new. Such a request fails with `IBV_WC_GENERAL_ERR`, a line on the
    /// standard error output says which, and [`Counters::changed_sends`](crate::Counters::changed_sends) counts it.
    ///
    /// It also tells of each packet that it drops without an answer though the program could mend it: no receive, one that is too
    /// short, a wrong key, and so on, as [`Counters`](crate::Counters) lists them. The first of each kind and queue pair is a
    /// line on the standard error output.
    ///
    /// And its packets have their invariant CRC within this machine too, where it is else left out: they never leave its memory.
    ///
    /// The default is yes in builds with debug assertions, as `cargo test` makes them: it costs two checksums of the data, and
    /// two CRCs.
    /// Memory that peers may write is not looked at, nor is inline data. Of more than a MiB, 256 pages are.
    pub fn strict(mut self, strict: bool) -> Self {
        self.settings.strict = strict;
        self
    }

    /// Whether READ and WRITE between two such devices, of two processes of a user on this machine, are carried out by the
    /// initiator in the target's memory (`process_vm_readv`, `process_vm_writev`), so that the target needs no processor for
    /// them, as with an adapter. A program that waits for a WRITE by looking at its memory then waits for that copy alone;
    /// else it waits until the target's thread has received the packets, which on a crowded machine may be milliseconds.
    ///
    /// It is for processes that trust each other: **any process of the user may read and write this one's memory** from
    /// then on. Where the kernel's Yama lets only a process's parents do that, making the device opens it to all of the user
    /// (`PR_SET_PTRACER_ANY`). Where the kernel refuses, as in containers without `CAP_SYS_PTRACE`, operations go by packets
    /// as on other devices, and a line on the standard error output says so once.
    ///
    /// What is carried out so: a READ or a WRITE without immediate data, of up to 4 MiB, on a reliable connection with no
    /// earlier request under way, to a region of ordinary memory by the region's own key, on Linux 5.3 or later. Everything else
    /// goes by packets, and what is not allowed does too, and has the usual error.
    /// [`Counters::one_sided`](crate::Counters::one_sided) counts them.
    ///
    /// Deregistering a region, and stopping a queue pair, wait for a peer that is copying at that moment, for a second at most; the
    /// device works meanwhile. If the peer's process is stopped there (`SIGSTOP`), `ibv_dereg_mr` of that region fails with
    /// `EBUSY`, until the process goes on or ends. A READ or WRITE waits for pages of the peer's memory that its own program
    /// brings (`userfaultfd`, FUSE).
    /// Drop the device before the process executes another program (`execve`): else a WRITE that a peer has just begun, or that it
    /// begins while a forked child has the device, may end in the new program's memory.
    ///
    /// The default is no. It has no effect in [strict mode](Self::strict), which looks at packets and is the default in builds
    /// with debug assertions, on a simulated [network](Self::network) and [through the kernel](Self::through_kernel).
    pub fn one_sided(mut self, one_sided: bool) -> Self {
        self.settings.one_sided = one_sided;
        self
    }

    /// Whether the ports have tables of GIDs as adapters have them, for programs that have an index built in: a link-local GID
    /// at index 0, the addresses from index 1 on, and the first address up to index 3 where there are no more. The link-local
    /// GID names the port's first IPv4 address, whose packets have that address; only devices of software know it. The
    /// default is no; devices of the environment variable `IBVERBS_SOFTWARE` have such tables.
    pub fn adapter_gids(mut self, adapter_gids: bool) -> Self {
        self.settings.adapter_gids = adapter_gids;
        self
    }

    /// Makes the device one like EFA: its queue pairs are of UD and SRD (scalable reliable datagrams), and it answers the
    /// `efadv_*` verbs that `ibverbs` calls. Needs feature `efa`. Of the capabilities it has `RDMA_READ`, `RDMA_WRITE` and
    /// `RNR_RETRY`; others have no effect.
    ///
    /// Messages of SRD arrive in any order, which the network's [seed](crate::NetworkBuilder::seed) decides; each arrives
    /// once, or its completion reports the failure. A failed one harms no other, and the queue pair goes on. The limits are
    /// EFA's: 8,928 bytes in a message and 1 GiB in a read or write, 32 inline bytes, two elements in a list and one for reads
    /// and writes, every request signaled; no shared receive queues, no atomics, no memory windows, no multicast. Sizes and
    /// counts can be changed after this call. The Q_Key has to be that of the peer.
    ///
    /// What it does not show: how fast EFA is, its order of messages, the time until it gives a peer up, its wire format (such
    /// a device talks to devices of this crate alone), its GIDs (they are those of RoCE here), receives of unsolicited writes,
    /// and completion queues of `efadv_create_cq`. The provider of EFA in rdma-core is not in use.
    ///
    /// ```
    /// use ibverbs::device::EfaCapabilities;
    ///
    /// let device = ibverbs_software::Device::builder().efa(EfaCapabilities::RDMA_READ).build()?;
    /// let attributes = device.open()?.query_efa()?;
    /// assert_eq!((attributes.max_inline_data(), attributes.max_send_sge()), (32, 2));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[cfg(feature = "efa")]
    pub fn efa(mut self, capabilities: ibverbs::device::EfaCapabilities) -> Self {
        use ibverbs::device::EfaCapabilities as C;

        let there = C::RDMA_READ | C::RDMA_WRITE | C::RNR_RETRY;
        self.settings.efa = Some((capabilities & there).bits());
        self.settings.max_sge = 2;
        self.settings.max_inline = 32;
        self.settings.max_qp_wr = 4096;
        (self.settings.max_mw, self.settings.max_srq) = (0, 0);
        self
    }

    #[cfg(not(feature = "efa"))]
    #[doc(hidden)]
    pub fn efa<'call, C>(self, _: C) -> Self
    where
        &'call Self: FeatureEfa,
    {
        self
    }

    /// Gives the device the DC (dynamically connected) transport of mlx5, beside the others: it answers the `mlx5dv_*` verbs
    /// that `ibverbs` calls for it. Needs feature `mlx5`.
    ///
    /// An initiator connects to a target with the first request for it, and waits for all answers before it turns to another
    /// one. A wrong access key is a remote access error; whatever fails a request fails the initiator, not the target.
    ///
    /// What it does not show: streams of initiators, memory keys, `mlx5dv_init_obj` and the other direct verbs of mlx5, and the
    /// wire format (such a device talks to devices of this crate alone). The provider of mlx5 in rdma-core is not in use.
    ///
    /// ```
    /// let device = ibverbs_software::Device::builder().mlx5().build()?;
    /// assert_eq!(device.open()?.query_mlx5()?.max_dc_rd_atom(), Some(16));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[cfg(feature = "mlx5")]
    pub fn mlx5(mut self) -> Self {
        self.settings.has_dc = true;
        self
    }

    #[cfg(not(feature = "mlx5"))]
    #[doc(hidden)]
    pub fn mlx5<'call>(self) -> Self
    where
        &'call Self: FeatureMlx5,
    {
        self
    }

    /// The largest packet of the ports. The default is 4096 bytes on a simulated network and on addresses of
    /// this machine only (127.0.0.0/8 and `::1`), else 1024, which fits into Ethernet's usual 1500.
    pub fn mtu(mut self, mtu: MaximumTransferUnit) -> Self {
        self.mtu = Some(mtu);
        self
    }

    /// Adds a port with these addresses, each of which becomes a GID of it, in this order. Without any port, the
    /// device has one port with a free address of 127.0.0.0/8.
    ///
    /// Hardware and Soft-RoCE have a link-local GID at index 0 and IPv4 from index 1 on. On a simulated network, a port with
    /// `fe80::1` in front of the other addresses has such a table: it finds programs that take index 0 for granted.
    ///
    /// Multicast groups are joined where the device's first address of their family is. `::1` is no such place: Linux has
    /// no route for groups of IPv6 there. A link-local address (`fe80::/10`) belongs to the first interface that has it. A
    /// device with addresses of IPv4 is in a group of IPv6 by a group of IPv4 (239.x.x.x) that stands for it: others of
    /// software hear what it sends there, adapters do not.
    pub fn port(mut self, addresses: impl IntoIterator<Item = IpAddr>) -> Self {
        self.settings.ports.push(addresses.into_iter().collect());
        self
    }

    /// Adds an address to the first port.
    pub fn address(mut self, address: IpAddr) -> Self {
        match self.settings.ports.first_mut() {
            Some(first) => first.push(address),
            None => self.settings.ports.push(vec![address]),
        }
        self
    }

    /// Makes the device.
    ///
    /// # Errors
    ///
    /// - [`AddrInUse`](std::io::ErrorKind::AddrInUse): another device, or the kernel's Soft-RoCE, has
    ///   UDP port 4791 of an address; or another device of the simulated network has the address.
    /// - [`AddrNotAvailable`](std::io::ErrorKind::AddrNotAvailable): an address is not one of this machine.
    /// - [`InvalidInput`](std::io::ErrorKind::InvalidInput): a port has no address, or there are more than
    ///   255 ports or addresses of one; an address is that of no one machine (0.0.0.0, a multicast group); a probability of the
    ///   [network](Self::network) is not within 0..=1; the name is empty, too long or has a zero byte.
    /// - Others: the system is out of files, threads or memory.
    pub fn build(self) -> io::Result<Device> {
        let network = self.network.as_ref().map(|network| network.0.clone());
        Device::make(self.settings(), network)
    }

    pub(crate) fn settings(mut self) -> Settings {
        let all = self.settings.ports.iter().flatten();
        let local = self.settings.is_simulated || all.into_iter().all(IpAddr::is_loopback);
        let usual = if local { MaximumTransferUnit::Mtu4096 } else { MaximumTransferUnit::Mtu1024 };
        self.settings.one_sided &= !self.settings.strict;
        self.settings.mtu = self.mtu.unwrap_or(usual).as_raw();
        self.settings.max_qp = self.settings.max_qp.min(MOST_NUMBERS);
        self.settings.max_srq = self.settings.max_srq.min(MOST_NUMBERS);
        self.settings
    }
}
