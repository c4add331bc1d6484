//! Devices: which there are, what they can do, and an open device.
//!
//! ```
//! # fn main() -> ibverbs::Result<()> {
//! # let rxe0 = ibverbs_software::Device::builder().name("rxe0").build().unwrap();
//! # rxe0.register();
//! for device in ibverbs::devices()?.iter() {
//!     let context = device.open()?;
//!     let (limits, port) = (context.query_device()?, context.query_port(1)?);
//!     println!("{:?}: {} queue pairs, port 1 is {:?}", device, limits.max_qp(), port.state());
//! }
//! # Ok(())
//! # }
//! ```
//!
//! | to | |
//! |---|---|
//! | find a device and open it | [`devices`], [`open`], [`open_first`]; [`DeviceList`], [`Device`], [`Guid`]; [`Context`] |
//! | ask what it can do | [`DeviceAttributes`], [`DeviceCapabilities`] and what they consist of |
//! | ask about a port and its addresses | [`PortAttributes`], [`PortState`], [`LinkLayer`], [`LinkSpeed`]; [`Gid`], [`GidEntry`], [`GidType`] |
//! | learn what happens to it | [`AsyncEvents`], [`AsyncEvent`], [`AsyncEventKind`] |
//! | count and measure | [`Counters`], [`Counter`], [`ProcessResources`], [`RawClock`] |
//! | fork | [`fork_init`], [`is_fork_initialized`], [`forks`] |
//!
//! Limits do not change while a device is open; the attributes of ports do.

mod async_event;
mod attributes;
mod capabilities;
mod clock;
mod context;
mod counters;
#[cfg(rdma_core_65)]
mod dma_handle;
#[cfg(feature = "efa")]
pub(crate) mod efa;
mod endpoint_gids;
pub(crate) mod event_file;
pub(crate) mod fork;
mod gid;
mod list;
#[cfg(feature = "mlx5")]
pub(crate) mod mlx5;
#[cfg(feature = "tokio")]
pub(crate) mod on_tokio;
mod port;
pub(crate) mod quirks;

pub(crate) use async_event::token;
pub use async_event::{AsyncEvent, AsyncEventKind, AsyncEventSubject, AsyncEvents};
pub use attributes::{AtomicCapability, DeviceAttributes};
pub use capabilities::{
    DeviceCapabilities, ModerationCapabilities, OnDemandPaging, OnDemandPagingCapabilities,
    OnDemandPagingOperations, PacketPacingCapabilities, PciAtomicCapabilities, QueuePairTypes,
    RawPacketCapabilities, ReceiveScalingCapabilities, SegmentationCapabilities,
    TagMatchingCapabilities, TagMatchingFlags,
};
#[cfg(feature = "channel")]
pub(crate) use clock::Clock;
pub use clock::RawClock;
pub use context::Context;
pub(crate) use context::ContextRef;
#[doc(hidden)]
pub use context::open_pointer;
pub use counters::{Counter, Counters, ProcessResources, process_resources};
#[cfg(rdma_core_65)]
pub use dma_handle::{DmaHandle, DmaHints, HintedMemory};
#[cfg(feature = "efa")]
pub use efa::{EfaAttributes, EfaCapabilities};
pub(crate) use endpoint_gids::{EndpointGid, EndpointGids};
pub use fork::{ForkStatus, fork_init, forks, is_fork_initialized};
pub use gid::{Gid, GidEntry, GidType, Guid};
#[cfg(feature = "rdmacm")]
pub(crate) use list::no_device_for;
pub use list::{DeviceList, devices, open, open_first};
#[cfg(feature = "mlx5")]
pub use mlx5::Mlx5Attributes;
pub use port::{LinkLayer, LinkSpeed, PhysicalState, PortAttributes, PortState};

use std::ffi::{CStr, OsStr};
use std::marker::PhantomData;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr::NonNull;

use crate::base::{Result, c_enum, debug, ffi};

/// `struct ibv_device`: a device in a [`DeviceList`].
#[derive(Clone, Copy)]
pub struct Device<'list> {
    raw: NonNull<ffi::ibv_device>,
    list: PhantomData<&'list DeviceList>,
}

// SAFETY: the fields do not change while the list lives.
unsafe impl Send for Device<'_> {}
// SAFETY: as above.
unsafe impl Sync for Device<'_> {}

impl<'list> Device<'list> {
    fn new(raw: *mut ffi::ibv_device) -> Option<Self> {
        NonNull::new(raw).map(|raw| Self { raw, list: PhantomData })
    }

    /// `ibv_open_device`: opens the device.
    ///
    /// # Errors
    ///
    ///  - `EACCES`, `EPERM`: the process may not open `/dev/infiniband/uverbs*`.
    ///  - `ENOENT`: that file does not exist, or is not this device's: the device is gone, was not passed to this
    ///    container, or its driver was loaded again. The error says which.
    ///  - `ENODEV`: the device is gone.
    ///  - `EMFILE`: the process has too many files open.
    ///  - `ENOMEM`: out of memory.
    #[doc(alias = "ibv_open_device")]
    pub fn open(&self) -> Result<Context<'list>> {
        // SAFETY: the list, borrowed for `'list`, keeps the device alive.
        unsafe { Context::open(self.raw.as_ptr()) }
    }

    fn open_alone(&self) -> Result<Context<'static>> {
        // SAFETY: the list holds the device, and the context takes its own reference (`verbs_init_context`).
        unsafe { Context::open(self.raw.as_ptr()) }
    }

    /// `ibv_get_device_name`: the kernel's name, such as `mlx5_0`; unique on the machine.
    #[doc(alias = "ibv_get_device_name")]
    pub fn name(&self) -> &'list str {
        // SAFETY: the device is live; the name is a null-terminated array in it that lives as long as the list.
        let name = unsafe { CStr::from_ptr((&raw const (*self.raw.as_ptr()).name).cast()) };
        name.to_str().unwrap_or("")
    }

    /// `ibv_get_device_guid`: the vendor's GUID; zero if there is none.
    #[doc(alias = "ibv_get_device_guid")]
    pub fn guid(&self) -> Guid {
        // SAFETY: the device is live.
        unsafe { Guid::of(self.raw.as_ptr()) }
    }

    /// `ibv_get_device_index`: the kernel's number, unique on the machine and never reused; `None` before
    /// Linux 5.1.
    #[doc(alias = "ibv_get_device_index")]
    pub fn index(&self) -> Option<u32> {
        // SAFETY: the device is live.
        u32::try_from(unsafe { ffi::ibv_get_device_index(self.raw.as_ptr()) }).ok()
    }

    /// The kind of device: a channel adapter, an RNIC ..
    #[doc(alias = "ibv_node_type_str")]
    pub fn node_type(&self) -> NodeType {
        // SAFETY: the device is live.
        unsafe { self.raw.as_ref() }.node_type.into()
    }

    /// The transport protocol. For RoCE it is InfiniBand;
    /// [`PortAttributes::link_layer`](crate::device::PortAttributes::link_layer) tells them apart.
    pub fn transport_type(&self) -> TransportType {
        // SAFETY: the device is live.
        unsafe { self.raw.as_ref() }.transport_type.into()
    }

    /// The device's folder in sysfs, such as `/sys/class/infiniband/mlx5_0`.
    #[doc(alias = "ibdev_path")]
    pub fn sysfs_path(&self) -> &'list Path {
        // SAFETY: the device is live; the path is a null-terminated array in it that lives as long as the list.
        let path = unsafe { CStr::from_ptr((&raw const (*self.raw.as_ptr()).ibdev_path).cast()) };
        Path::new(OsStr::from_bytes(path.to_bytes()))
    }

    /// The C object, valid for `'list`.
    pub fn as_raw(&self) -> *mut ffi::ibv_device {
        self.raw.as_ptr()
    }
}

debug! {
    Device<'_>, self,
    name: self.name(), guid: self.guid(), node_type: self.node_type(),
    transport_type: self.transport_type()
}

c_enum! {
    /// `enum ibv_node_type`: the kind of a device.
    #[doc(alias = "ibv_node_type")]
    pub enum NodeType: ibv_node_type(i32) {
        /// An InfiniBand (or RoCE) channel adapter.
        ChannelAdapter = IBV_NODE_CA,
        /// An InfiniBand switch.
        Switch = IBV_NODE_SWITCH,
        /// An InfiniBand router.
        Router = IBV_NODE_ROUTER,
        /// An iWARP adapter.
        Rnic = IBV_NODE_RNIC,
        /// A Cisco usNIC.
        Usnic = IBV_NODE_USNIC,
        /// A Cisco usNIC over UDP.
        UsnicUdp = IBV_NODE_USNIC_UDP,
        /// Another kind, such as EFA.
        Unspecified = IBV_NODE_UNSPECIFIED,
    }
}

c_enum! {
    /// `enum ibv_transport_type`: the transport protocol of a device.
    #[doc(alias = "ibv_transport_type")]
    pub enum TransportType: ibv_transport_type(i32) {
        /// InfiniBand's transport, over InfiniBand or RoCE.
        InfiniBand = IBV_TRANSPORT_IB,
        /// iWARP, over TCP.
        Iwarp = IBV_TRANSPORT_IWARP,
        /// Cisco usNIC.
        Usnic = IBV_TRANSPORT_USNIC,
        /// Cisco usNIC over UDP.
        UsnicUdp = IBV_TRANSPORT_USNIC_UDP,
        /// The vendor's own transport, such as EFA's SRD.
        Unspecified = IBV_TRANSPORT_UNSPECIFIED,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_node_types_are_kept() {
        assert_eq!(NodeType::from(ffi::ibv_node_type(-1)), NodeType::Unknown(-1));
        assert_eq!(TransportType::from(ffi::ibv_transport_type(99)), TransportType::Unknown(99));
    }
}

#[cfg(not(feature = "efa"))]
crate::base::features::methods_of_feature! {
    crate::base::features::FeatureEfa:
    impl[] Context<'_> { query_efa() }
    impl[] crate::verbs::queue_pair::AddressHandle<'_> { efa_number() }
}

#[cfg(not(feature = "mlx5"))]
crate::base::features::methods_of_feature! {
    crate::base::features::FeatureMlx5:
    impl[] Context<'_> { query_mlx5() }
    impl[] Device<'_> { is_mlx5() }
}
