use std::ffi::CStr;
use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, OnceLock};

use super::attributes::DeviceAttributes;
use super::endpoint_gids::{EndpointGid, EndpointGids};
use super::gid::{Gid, GidEntry, Guid};
use super::port::{LinkLayer, PortAttributes};
use super::{Device, TransportType, fork};
use crate::base::{
    Detail, Error, GidClass, Handle, Parent, Result, debug, device_access::Unusable, ffi, linux,
    object, resource,
};

object!(ibv_context, ibv_close_device);

const QUERY_GID_TABLE: &str = "ibv_query_gid_table";

const NO_GID: Error = Error::with_reason(
    QUERY_GID_TABLE,
    linux::ENODATA,
    "the port has no GID: is its network interface up, with an address?",
);

/// What is made from a context borrows or shares it.
pub(crate) type ContextRef<'ctx> = Parent<'ctx, Context<'ctx>>;

/// `struct ibv_context`: an open device, from which everything else is made.
///
/// `'a` is the lifetime of the [`DeviceList`](crate::device::DeviceList) for
/// [`Device::open`](crate::Device::open), and `'static` for [`open`](crate::open). Port attributes,
/// GIDs and P_Keys change, so each query asks the kernel. The context asks once for the device's limits,
/// which do not change, to check what is made from it.
pub struct Context<'a> {
    raw: Handle<ffi::ibv_context>,
    from: PhantomData<&'a ()>,
    /// The peers' reads and atomics that its queue pairs together answer at a time.
    answers_taken: Arc<AtomicU32>,
    limits: OnceLock<Box<DeviceAttributes>>,
}

resource! {
    /// `ibv_close_device`: closes the device, and returns an error that dropping would ignore.
    ///
    /// # Errors
    ///
    /// The provider's errno value. The context, with all that it was made from, is then
    /// [leaked](crate::_guide::verbs#when-a-resource-cannot-be-destroyed).
    #[doc(alias = "ibv_close_device")]
    Context<'a>: raw of ibv_context
}

impl<'a> Context<'a> {
    /// `ibv_open_device`.
    ///
    /// # Safety
    ///
    /// `device` is live during the call.
    pub(crate) unsafe fn open(device: *mut ffi::ibv_device) -> Result<Self> {
        const VERB: &str = "ibv_open_device";
        *fork::exclusive() = true;
        // SAFETY: the caller vouches for the device; a context that comes back is ours alone.
        let raw = unsafe { Handle::new(VERB, ffi::ibv_open_device(device)) }.map_err(|error| {
            // SAFETY: as above; the name is a null-terminated array in the device.
            let name = unsafe { CStr::from_ptr((&raw const (*device).name).cast()) };
            explain(error, &name.to_string_lossy())
        })?;
        Ok(Self { raw, from: PhantomData, answers_taken: Arc::default(), limits: OnceLock::new() })
    }

    /// Takes over a context that was opened elsewhere, such as by a C library.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the pointer is null.
    ///
    /// # Safety
    ///
    /// `raw` is null, or a live context of a kernel device that stays valid for `'a`. Its `cmd_fd` is an open
    /// file, which rules out VFIO devices (`mlx5dv_get_vfio_device_list`). Nothing else closes it: dropping
    /// the `Context` does (wrap a lent context in [`std::mem::ManuallyDrop`]).
    pub unsafe fn from_raw(raw: *mut ffi::ibv_context) -> Result<Self> {
        Error::invalid_if(raw.is_null(), "ibv_open_device", "the context is null")?;
        *fork::exclusive() = true;
        // SAFETY: the caller hands over a live context.
        let raw = unsafe { Handle::new("ibv_open_device", raw) }?;
        Ok(Self { raw, from: PhantomData, answers_taken: Arc::default(), limits: OnceLock::new() })
    }

    pub(crate) fn answers_taken(&self) -> &Arc<AtomicU32> {
        &self.answers_taken
    }

    pub(super) fn device(&self) -> Device<'_> {
        // SAFETY: a live context holds its device.
        let raw = unsafe { NonNull::new_unchecked((*self.as_raw()).device) };
        Device { raw, list: PhantomData }
    }

    /// The kernel's name of the device, such as `mlx5_0`.
    pub fn name(&self) -> &str {
        self.device().name()
    }

    /// `EINVAL` if they are two, such as of one device that was opened twice.
    pub(crate) fn check_same(
        &self,
        other: &Context<'_>,
        verb: &'static str,
        reason: &'static str,
    ) -> Result<()> {
        Error::invalid_if(self.as_raw() != other.as_raw(), verb, reason)
    }

    pub(crate) fn is_iwarp(&self) -> bool {
        self.transport_type() == TransportType::Iwarp
    }

    /// `ibv_get_device_guid`: the vendor's GUID of the device; zero if it has none.
    #[doc(alias = "ibv_get_device_guid")]
    pub fn guid(&self) -> Guid {
        self.device().guid()
    }

    /// The transport protocol. For RoCE it is InfiniBand; [`PortAttributes::link_layer`] tells them apart.
    pub fn transport_type(&self) -> TransportType {
        self.device().transport_type()
    }

    /// `ibv_query_device`: the device's limits and capabilities.
    ///
    /// # Errors
    ///
    ///  - `ENOMEM`: out of memory.
    ///  - `EIO`, `ENODEV`: the device is gone.
    #[doc(alias = "ibv_query_device")]
    #[doc(alias = "ibv_query_device_ex")]
    pub fn query_device(&self) -> Result<DeviceAttributes> {
        let mut raw = ffi::ibv_device_attr_ex::default();
        // SAFETY: the context is live and `raw` is writable.
        let returned =
            unsafe { ffi::ibv_query_device_ex(self.as_raw(), std::ptr::null(), &mut raw) };
        ffi::status("ibv_query_device", returned)?;
        Ok(DeviceAttributes::from(raw))
    }

    /// The attributes of the first query that succeeded.
    pub(crate) fn limits(&self) -> Result<&DeviceAttributes> {
        match self.limits.get() {
            Some(limits) => Ok(limits),
            None => {
                let limits = Box::new(self.query_device()?);
                Ok(self.limits.get_or_init(|| limits))
            }
        }
    }

    /// `ibv_query_port`: the attributes of a port, counted from 1.
    ///
    /// # Errors
    ///
    /// Those of [`query_device`](Self::query_device); `EINVAL`: the device has no such port.
    #[doc(alias = "ibv_query_port")]
    pub fn query_port(&self, port: u8) -> Result<PortAttributes> {
        const VERB: &str = "ibv_query_port";
        let mut raw = ffi::ibv_port_attr::default();
        // SAFETY: the context is live and `raw` is writable.
        let returned = unsafe { ffi::___ibv_query_port(self.as_raw(), port, &mut raw) };
        if returned != 0 {
            Error::within(VERB, "port number", port, 1, self.query_device()?.phys_port_cnt())?;
        }
        ffi::status(VERB, returned)?;
        Ok(PortAttributes::from(raw))
    }

    /// `ibv_query_port_speed`: the real speed of a port now, in units of 100 Mb/s (4000: 400 Gb/s), also of
    /// an aggregated or slowed link. Needs rdma-core 65.
    ///
    /// # Errors
    ///
    /// Those of [`query_port`](Self::query_port); `EOPNOTSUPP`: the device or the kernel does not tell.
    #[cfg(rdma_core_65)]
    #[doc(alias = "ibv_query_port_speed")]
    pub fn query_port_speed(&self, port: u8) -> Result<u64> {
        let mut speed = 0;
        // SAFETY: the context is live and `speed` is writable.
        let returned = unsafe { ffi::ibv_query_port_speed(self.as_raw(), port.into(), &mut speed) };
        ffi::status("ibv_query_port_speed", returned)?;
        Ok(speed)
    }

    /// `ibv_query_gid_ex`: the entry at `index` of a port's GID table.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: there is no such port, or `index` is beyond its table.
    ///  - `ENODATA`: the entry is empty.
    #[doc(alias = "ibv_query_gid")]
    #[doc(alias = "ibv_query_gid_ex")]
    pub fn query_gid(&self, port: u8, index: u32) -> Result<GidEntry> {
        const VERB: &str = "ibv_query_gid_ex";
        let length = self.query_port(port)?.gid_table_len();
        if index >= length {
            let last = u64::from(length).wrapping_sub(1);
            let (low, high) = if length == 0 { (1, 0) } else { (0, last) };
            return Err(Error::out_of_range(VERB, "GID index", index.into(), low, high));
        }
        let mut raw = ffi::ibv_gid_entry::default();
        // SAFETY: the context is live; `raw` is writable and of the size passed.
        let returned = unsafe {
            ffi::_ibv_query_gid_ex(
                self.as_raw(),
                port.into(),
                index,
                &mut raw,
                0,
                size_of_val(&raw),
            )
        };
        ffi::status(VERB, returned).map_err(|error| match error.errno() {
            errno @ linux::ENODATA => Error::with(VERB, errno, Detail::GidIndex { index, port }),
            _ => error,
        })?;
        Ok(GidEntry::from(raw))
    }

    /// `ibv_query_gid_table`: the GIDs of all ports, without empty entries.
    ///
    /// # Errors
    ///
    ///  - `ENOMEM`: out of memory.
    ///  - `EIO`, `ENODEV`: the device is gone.
    #[doc(alias = "ibv_query_gid_table")]
    pub fn gid_table(&self) -> Result<Vec<GidEntry>> {
        self.with_gid_table(|entries| entries.collect())
    }

    fn with_gid_table<R>(
        &self,
        f: impl FnOnce(&mut dyn Iterator<Item = GidEntry>) -> R,
    ) -> Result<R> {
        // Most ports have few GIDs in a table of hundreds, and the kernel clears and copies all the room. EINVAL: there
        // are more GIDs.
        let mut few = [ffi::ibv_gid_entry::default(); 16];
        match self.fill_gid_table(&mut few) {
            Err(error) if error.errno() == libc::EINVAL => {}
            result => return Ok(f(&mut few[..result?].iter().copied().map(GidEntry::from))),
        }
        let mut room = 0;
        for port in 1..=self.query_device()?.phys_port_cnt() {
            room += self.query_port(port)?.gid_table_len() as usize;
        }
        let mut table = Vec::new();
        table.try_reserve_exact(room).map_err(|_| Error::new(QUERY_GID_TABLE, libc::ENOMEM))?;
        table.resize(room, ffi::ibv_gid_entry::default());
        let filled = self.fill_gid_table(&mut table)?;
        table.truncate(filled);
        Ok(f(&mut table.into_iter().map(GidEntry::from)))
    }

    fn fill_gid_table(&self, table: &mut [ffi::ibv_gid_entry]) -> Result<usize> {
        let (room, size) = (table.len(), size_of::<ffi::ibv_gid_entry>());
        // SAFETY: the context is live, and the table has this many entries.
        let returned =
            unsafe { ffi::_ibv_query_gid_table(self.as_raw(), table.as_mut_ptr(), room, 0, size) };
        ffi::count(QUERY_GID_TABLE, returned).map(|filled| filled.min(room))
    }

    /// The GID by which a peer in the network reaches `port`.
    ///
    /// On InfiniBand it is the first entry. On RoCE, in order: RoCE v2 with a mapped IPv4 address, with a
    /// global IPv6 address, with a link-local one, then RoCE v1. Among equals the lowest index wins.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: there is no such port.
    ///  - `ENODATA`: its table is empty, as for a RoCE port whose network interface is down or has no
    ///    address.
    pub fn routable_gid(&self, port: u8) -> Result<GidEntry> {
        let link_layer = self.query_port(port)?.link_layer();
        if link_layer == LinkLayer::InfiniBand {
            return self.query_gid(port, 0);
        }
        let table = self.gid_table()?;
        let entries = table.into_iter().filter(|e| e.port == port && !e.gid.is_zero());
        entries.min_by_key(|e| (e.preference(), e.index)).ok_or(NO_GID)
    }

    /// First that of [`routable_gid`](Self::routable_gid). An InfiniBand port may have none.
    pub(crate) fn endpoint_gids(&self, port: &PortAttributes, number: u8) -> Result<EndpointGids> {
        if port.link_layer() == LinkLayer::InfiniBand {
            let gid = self.query_gid(number, 0).map_or(Gid::ZERO, |entry| entry.gid);
            return Ok(EndpointGids::one(gid, GidClass::InfiniBand));
        }
        let gids = self.with_gid_table(|entries| {
            EndpointGids::of_table(entries.filter(|entry| entry.port == number))
        })?;
        if gids.is_empty() { Err(NO_GID) } else { Ok(gids) }
    }

    /// Finds the index of a GID, which changes when an address is removed and comes back.
    pub(crate) fn index_of_gid(&self, port: u8, gid: &EndpointGid) -> Result<u8> {
        let entry = self.with_gid_table(|entries| {
            let entries = entries.filter(|e| e.port == port && EndpointGid::from(e) == *gid);
            entries.min_by_key(|e| (e.preference(), e.index))
        })?;
        let reason = "our GID, which the peer knows, is not in the port's table any more: was the address removed?";
        entry.ok_or(Error::with_reason("ibv_modify_qp", libc::EADDRNOTAVAIL, reason))?.short_index()
    }

    /// `ibv_query_pkey`: the entry at `index` of a port's P_Key table. The top bit is set for a full member.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: there is no such port, or `index` is beyond its table.
    #[doc(alias = "ibv_query_pkey")]
    pub fn query_pkey(&self, port: u8, index: u16) -> Result<u16> {
        const VERB: &str = "ibv_query_pkey";
        self.query_port(port)?.check_pkey_index(VERB, index)?;
        let mut pkey = 0;
        // SAFETY: the context is live and `pkey` is writable.
        let returned = unsafe { ffi::ibv_query_pkey(self.as_raw(), port, index.into(), &mut pkey) };
        ffi::status(VERB, returned)?;
        Ok(u16::from_be(pkey))
    }

    /// `ibv_get_pkey_index`: the index of `pkey` in a port's P_Key table. All 16 bits must match.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: there is no such port.
    ///  - `ENOENT`: the port is not in that partition.
    #[doc(alias = "ibv_get_pkey_index")]
    pub fn pkey_index(&self, port: u8, pkey: u16) -> Result<u16> {
        for index in 0..self.query_port(port)?.pkey_table_len() {
            if self.query_pkey(port, index)? == pkey {
                return Ok(index);
            }
        }
        let reason = "the port is not in that partition";
        Err(Error::with_reason("ibv_get_pkey_index", libc::ENOENT, reason))
    }

    /// The device's completion vectors: interrupts over which completion queues can be spread.
    pub fn completion_vectors(&self) -> u32 {
        // SAFETY: the context is live.
        u32::try_from(unsafe { (*self.as_raw()).num_comp_vectors }).unwrap_or(0)
    }
}

/// libibverbs reports the last file that it tried, one of udev; this looks at the device's own.
fn explain(error: Error, device: &str) -> Error {
    if error.errno() != libc::ENOENT {
        return error;
    }
    match Unusable::of(device) {
        None => Error::with_reason(error.verb(), libc::ENOENT, "the device is gone"),
        found => error.or_unusable(found),
    }
}

debug! { Context<'_>, self, device: self.name(), .. }

/// Opens a device of the provider.
///
/// # Errors
///
/// Those of the provider.
///
/// # Safety
///
/// The device is live during the call; a context holds it from then on.
pub unsafe fn open_pointer(device: NonNull<ffi::ibv_device>) -> Result<Context<'static>> {
    // SAFETY: the caller vouches for it.
    unsafe { Context::open(device.as_ptr()) }
}
