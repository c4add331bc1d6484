//! Identifiers of the connection manager, which are to it what sockets are to TCP.

#[cfg(rdma_core_65)]
use std::ffi::CStr;
use std::ffi::c_int;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::time::{Duration, Instant};
use std::{mem, ptr};

use super::diagnose::{self, RawAddress, socket_addr};
use super::error::ConnectionError;
#[cfg(feature = "channel")]
use super::established::Established;
use super::event::{Copied, EventChannel};
use crate::base::{Error, QueuePairState, Result, ffi};
#[cfg(feature = "channel")]
use crate::channel::parts::PeerSign;
use crate::verbs::device::{Context, Device, TransportType, devices};
use crate::verbs::queue_pair::EnhancedConnection;

/// `struct rdma_cm_id`, with its own channel for events.
///
/// Events are acknowledged before the read returns, so destroying never waits for one. librdmacm's own context and
/// domain (`id->verbs`, `id->pd`) are never handed out. `id->qp` is null: the identifier only knows the number of the
/// program's queue pair.
#[derive(Debug)]
pub(super) struct Id {
    /// Null once destroyed or leaked.
    raw: *mut ffi::rdma_cm_id,
    channel: EventChannel,
    /// Of a connection that a loop watches.
    #[cfg(feature = "channel")]
    sign: Option<Established>,
}

// SAFETY: librdmacm's functions may be called on any thread; what changes the identifier takes `&mut self`.
unsafe impl Send for Id {}
// SAFETY: as above; `&self` reads fields that librdmacm writes only under `&mut self`.
unsafe impl Sync for Id {}

impl Drop for Id {
    fn drop(&mut self) {
        // The channel is dropped after this.
        let _ = self.destroy();
    }
}

impl Id {
    pub(super) fn new(port_space: ffi::rdma_port_space) -> Result<Self> {
        let channel = EventChannel::new()?;
        let mut raw = ptr::null_mut();
        // SAFETY: the channel is live and outlives the identifier; the pointer is ours.
        let returned =
            unsafe { ffi::rdma_create_id(channel.as_ptr(), &mut raw, ptr::null_mut(), port_space) };
        ffi::status("rdma_create_id", returned)?;
        Ok(Self::of(raw, channel))
    }

    /// A failure destroys the request and tells the peer.
    ///
    /// # Safety
    ///
    /// `raw` is live and owned by nothing else, all of its events are acknowledged, and its current channel is live
    /// during the call.
    pub(super) unsafe fn migrate(
        raw: NonNull<ffi::rdma_cm_id>,
        channel: EventChannel,
    ) -> Result<Self> {
        // Owned before anything can fail.
        let id = Self::of(raw.as_ptr(), channel);
        // SAFETY: both are live. All of its events are acknowledged, so this does not wait.
        let returned = unsafe { ffi::rdma_migrate_id(id.raw, id.channel.as_ptr()) };
        ffi::status("rdma_migrate_id", returned)?;
        Ok(id)
    }

    fn of(raw: *mut ffi::rdma_cm_id, channel: EventChannel) -> Self {
        Self {
            raw,
            channel,
            #[cfg(feature = "channel")]
            sign: None,
        }
    }

    /// Tells that the peer has disconnected, once the peer is known.
    #[cfg(feature = "channel")]
    pub(super) fn sign(&mut self) -> Box<dyn PeerSign> {
        let raw = self.raw;
        // SAFETY: only `destroy` destroys the identifier, and it ends the sign first.
        let sign = self.sign.get_or_insert_with(|| unsafe { Established::new(raw) });
        Box::new(sign.clone())
    }

    /// Leaks the identifier on failure.
    pub(super) fn destroy(&mut self) -> Result<()> {
        let raw = mem::replace(&mut self.raw, ptr::null_mut());
        if raw.is_null() {
            return Ok(());
        }
        #[cfg(feature = "channel")]
        self.sign.iter().for_each(|sign| sign.end());
        // SAFETY: the identifier is live and not used again. Its events that were read are acknowledged, and `&mut
        // self` keeps others from reading, so this does not wait.
        ffi::status("rdma_destroy_id", unsafe { ffi::rdma_destroy_id(raw) })
    }

    fn live(&self, verb: &'static str) -> Result<*mut ffi::rdma_cm_id> {
        if self.raw.is_null() {
            let reason = "the device was removed, and the connection with it";
            return Err(Error::with_reason(verb, libc::ENODEV, reason));
        }
        Ok(self.raw)
    }

    fn call(
        &self,
        verb: &'static str,
        function: impl FnOnce(*mut ffi::rdma_cm_id) -> c_int,
    ) -> Result<()> {
        ffi::status(verb, function(self.live(verb)?))
    }

    pub(super) fn as_ptr(&self) -> *mut ffi::rdma_cm_id {
        self.raw
    }

    pub(super) fn next(&mut self) -> Result<Option<Copied>> {
        self.live("rdma_get_cm_event")?;
        self.channel.next()
    }

    pub(super) fn next_before(&mut self, deadline: Option<Instant>) -> Result<Copied> {
        self.live("rdma_get_cm_event")?;
        self.channel.next_before(deadline)
    }

    pub(super) fn bind(&mut self, address: SocketAddr) -> Result<()> {
        const VERB: &str = "rdma_bind_addr";
        diagnose::check(VERB, address, false)?;
        let mut raw_address = RawAddress::from(address);
        // SAFETY: the identifier is live, and the address is one.
        self.call(VERB, |raw| unsafe { ffi::rdma_bind_addr(raw, raw_address.as_mut_ptr()) })
            .map_err(|error| diagnose::explain_bind(error, address))
    }

    pub(super) fn listen(&mut self, backlog: u32) -> Result<()> {
        let backlog = i32::try_from(backlog).unwrap_or(i32::MAX);
        // SAFETY: the identifier is live.
        let listens = self.call("rdma_listen", |raw| unsafe { ffi::rdma_listen(raw, backlog) });
        listens.map_err(|error| match self.local_addr() {
            Some(address) => diagnose::explain_bind(error, address),
            None => error,
        })
    }

    pub(super) fn resolve_address(
        &mut self,
        source: Option<SocketAddr>,
        destination: SocketAddr,
        timeout: Duration,
    ) -> Result<()> {
        const VERB: &str = "rdma_resolve_addr";
        if let Some(source) = source {
            diagnose::check(VERB, source, false)?;
        }
        diagnose::check(VERB, destination, true)?;
        let mut source = source.map(RawAddress::from);
        let mut destination = RawAddress::from(destination);
        let source = source.as_mut().map_or(ptr::null_mut(), RawAddress::as_mut_ptr);
        let destination = destination.as_mut_ptr();
        // SAFETY: the identifier is live; each address is valid, or null where that is allowed.
        self.call(VERB, |raw| unsafe {
            ffi::rdma_resolve_addr(raw, source, destination, milliseconds(timeout))
        })
        .map_err(diagnose::explain)
    }

    /// An event reports the addresses.
    #[cfg(rdma_core_65)]
    pub(super) fn resolve_name(&mut self, node: &CStr, service: &CStr) -> Result<()> {
        const VERB: &str = "rdma_resolve_addrinfo";
        let raw = self.live(VERB)?;
        // SAFETY: the identifier is live, and the call keeps no pointer to the texts.
        let returned = unsafe {
            ffi::rdma_resolve_addrinfo(raw, node.as_ptr(), service.as_ptr(), ptr::null())
        };
        // librdmacm leaves the resolver's negative number in errno, or -1 if the kernel takes no such event.
        ffi::status(VERB, returned).map_err(|_| match ffi::errno() {
            -1 => Error::with_reason(VERB, libc::EOPNOTSUPP, NEEDS_WRITTEN_EVENTS),
            errno if errno < 0 => unresolved(VERB, errno, node, service),
            errno => Error::new(VERB, errno),
        })
    }

    /// Takes the first address of the name.
    #[cfg(rdma_core_65)]
    pub(super) fn resolve_found(
        &mut self,
        source: Option<SocketAddr>,
        timeout: Duration,
    ) -> Result<()> {
        const VERB: &str = "rdma_query_addrinfo";
        let mut found = ptr::null_mut();
        // SAFETY: the identifier is live, and the pointer is ours.
        self.call(VERB, |raw| unsafe { ffi::rdma_query_addrinfo(raw, &mut found) })?;
        // SAFETY: the list is live; an address in it has the length of its family.
        let address = unsafe {
            let first = found.as_ref().filter(|first| !first.ai_dst_addr.is_null());
            first.and_then(|first| socket_addr(first.ai_dst_addr))
        };
        // SAFETY: the list is ours and not used after this.
        unsafe { ffi::rdma_freeaddrinfo(found) };
        let none = || Error::with_reason(VERB, libc::ENOENT, "the name has no IP address");
        self.resolve_address(source, address.ok_or_else(none)?, timeout)
    }

    #[cfg(rdma_core_65)]
    pub(super) fn write_event(&self, status: i32, argument: u64) -> Result<()> {
        const VERB: &str = "rdma_write_cm_event";
        let kind = ffi::rdma_cm_event_type::RDMA_CM_EVENT_USER;
        // SAFETY: the identifier is live.
        let write = |raw| unsafe { ffi::rdma_write_cm_event(raw, kind, status, argument) };
        self.call(VERB, write).map_err(|error| match error.errno() {
            libc::EINVAL => Error::with_reason(VERB, libc::EOPNOTSUPP, NEEDS_WRITTEN_EVENTS),
            _ => error,
        })
    }

    pub(super) fn resolve_route(&mut self, timeout: Duration) -> Result<()> {
        const VERB: &str = "rdma_resolve_route";
        let raw = self.live(VERB)?;
        self.device()?;
        // SAFETY: the identifier is live and has the device that librdmacm accesses.
        ffi::status(VERB, unsafe { ffi::rdma_resolve_route(raw, milliseconds(timeout)) })
    }

    pub(super) fn connect(&mut self, parameters: &mut ffi::rdma_conn_param) -> Result<()> {
        const VERB: &str = "rdma_connect";
        let raw = self.live(VERB)?;
        self.device()?;
        // SAFETY: as in `resolve_route`. The call keeps no pointer to the parameters or the private data.
        ffi::status(VERB, unsafe { ffi::rdma_connect(raw, parameters) })
    }

    pub(super) fn accept(&mut self, parameters: &mut ffi::rdma_conn_param) -> Result<()> {
        const VERB: &str = "rdma_accept";
        let raw = self.live(VERB)?;
        self.device()?;
        // SAFETY: as in `connect`.
        ffi::status(VERB, unsafe { ffi::rdma_accept(raw, parameters) })
    }

    /// `data` has at most 255 bytes.
    pub(super) fn reject(&mut self, data: &[u8]) -> Result<()> {
        let len = u8::try_from(data.len()).unwrap_or(u8::MAX);
        // SAFETY: the identifier is live, and `data` has at least `len` bytes.
        self.call("rdma_reject", |raw| unsafe { ffi::rdma_reject(raw, data.as_ptr().cast(), len) })
    }

    pub(super) fn establish(&mut self) -> Result<()> {
        // SAFETY: the identifier is live.
        self.call("rdma_establish", |raw| unsafe { ffi::rdma_establish(raw) })
    }

    pub(super) fn disconnect(&mut self) -> Result<()> {
        // SAFETY: the identifier is live. It has no queue pair, so this only tells the peer.
        self.call("rdma_disconnect", |raw| unsafe { ffi::rdma_disconnect(raw) })
    }

    pub(super) fn notify_established(&mut self) -> Result<()> {
        let event = ffi::ibv_event_type::IBV_EVENT_COMM_EST;
        // SAFETY: the identifier is live.
        self.call("rdma_notify", |raw| unsafe { ffi::rdma_notify(raw, event) })
    }

    pub(super) fn set_option<T: Copy>(&mut self, option: u32, mut value: T) -> Result<()> {
        let (level, option) = (ffi::RDMA_OPTION_ID.0 as i32, option as i32);
        // SAFETY: the identifier is live, and the call keeps no pointer to the value.
        self.call("rdma_set_option", |raw| unsafe {
            ffi::rdma_set_option(raw, level, option, (&raw mut value).cast(), size_of::<T>())
        })
    }

    pub(super) fn queue_pair_attributes(
        &mut self,
        state: QueuePairState,
    ) -> Result<(ffi::ibv_qp_attr, u32)> {
        let mut attributes = ffi::ibv_qp_attr { qp_state: state.into(), ..Default::default() };
        let mut mask = 0;
        // SAFETY: the identifier is live, and both are ours.
        self.call("rdma_init_qp_attr", |raw| unsafe {
            ffi::rdma_init_qp_attr(raw, &mut attributes, &mut mask)
        })?;
        Ok((attributes, mask as u32))
    }

    pub(super) fn set_local_ece(&mut self, ece: EnhancedConnection) -> Result<()> {
        let EnhancedConnection { vendor_id, options } = ece;
        let mut ece = ffi::ibv_ece { vendor_id, options, comp_mask: 0 };
        // SAFETY: the identifier is live, and the options are ours.
        self.call("rdma_set_local_ece", |raw| unsafe { ffi::rdma_set_local_ece(raw, &mut ece) })
    }

    pub(super) fn remote_ece(&self) -> Result<EnhancedConnection> {
        let mut ece = ffi::ibv_ece::default();
        // SAFETY: as above.
        self.call("rdma_get_remote_ece", |raw| unsafe { ffi::rdma_get_remote_ece(raw, &mut ece) })?;
        Ok(EnhancedConnection { vendor_id: ece.vendor_id, options: ece.options })
    }

    pub(super) fn join_multicast(&mut self, address: SocketAddr, send_only: bool) -> Result<()> {
        use ffi::{rdma_cm_join_mc_attr_mask as mask, rdma_cm_mc_join_flags as flags};

        let mut address = RawAddress::from(address);
        let join = if send_only {
            flags::RDMA_MC_JOIN_FLAG_SENDONLY_FULLMEMBER
        } else {
            flags::RDMA_MC_JOIN_FLAG_FULLMEMBER
        };
        let mut attributes = ffi::rdma_cm_join_mc_attr_ex {
            comp_mask: mask::RDMA_CM_JOIN_MC_ATTR_ADDRESS.0
                | mask::RDMA_CM_JOIN_MC_ATTR_JOIN_FLAGS.0,
            join_flags: join.0,
            addr: address.as_mut_ptr(),
        };
        // SAFETY: the identifier is live, and the address is one. No queue pair is involved.
        self.call("rdma_join_multicast_ex", |raw| unsafe {
            ffi::rdma_join_multicast_ex(raw, &mut attributes, ptr::null_mut())
        })
    }

    /// Call it before the destroy, even if it fails.
    pub(super) fn leave_multicast(&mut self, address: SocketAddr) -> Result<()> {
        let mut address = RawAddress::from(address);
        // SAFETY: the identifier is live. The group's events that were read are acknowledged, so this does not wait.
        self.call("rdma_leave_multicast", |raw| unsafe {
            ffi::rdma_leave_multicast(raw, address.as_mut_ptr())
        })
    }

    /// `None` until bound or resolved.
    pub(super) fn local_addr(&self) -> Option<SocketAddr> {
        // SAFETY: the identifier is live if it is not null, and the address is as large as a `sockaddr_storage`.
        unsafe { socket_addr((&raw const self.raw.as_ref()?.route.addr.__bindgen_anon_1).cast()) }
    }

    pub(super) fn peer_addr(&self) -> Option<SocketAddr> {
        // SAFETY: as above.
        unsafe { socket_addr((&raw const self.raw.as_ref()?.route.addr.__bindgen_anon_2).cast()) }
    }

    fn device(&self) -> Result<*mut ffi::ibv_device> {
        const VERB: &str = "rdma_resolve_addr";
        let raw = self.live(VERB)?;
        // SAFETY: the identifier is live, and so is its context, if it has one.
        unsafe {
            if (*raw).verbs.is_null() {
                let reason = "the address belongs to no device";
                return Err(Error::with_reason(VERB, libc::ENODEV, reason));
            }
            Ok((*(*raw).verbs).device)
        }
    }

    pub(super) fn device_name(&self) -> Option<String> {
        let device = self.device().ok()?;
        // SAFETY: the identifier keeps its device alive; the name is an array in the device.
        let name = unsafe { std::ffi::CStr::from_ptr((&raw const (*device).name).cast()) };
        Some(name.to_string_lossy().into_owned())
    }

    pub(super) fn port(&self) -> u8 {
        // SAFETY: the identifier is live if it is not null.
        if self.raw.is_null() { 0 } else { unsafe { (*self.raw).port_num } }
    }

    pub(super) fn is_iwarp(&self) -> bool {
        self.device().is_ok_and(|device| {
            // SAFETY: the identifier keeps its device alive.
            TransportType::from(unsafe { (*device).transport_type }) == TransportType::Iwarp
        })
    }

    pub(super) fn open_device(&self) -> Result<Context<'static>> {
        let wanted = self.device()?;
        let list = devices()?;
        let found = list.iter().find(|device| same(device.as_raw(), wanted));
        match found.as_ref().map(Device::as_raw) {
            // SAFETY: the list is live during the call, and the context takes a reference to its device.
            Some(device) => unsafe { Context::open(device) },
            None => Err(Error::new("ibv_open_device", libc::ENODEV)),
        }
    }

    /// Checks that `port` of the live `context` is where this identifier is.
    pub(super) fn check(
        &self,
        context: *mut ffi::ibv_context,
        port: u8,
    ) -> Result<(), ConnectionError> {
        let device = self.device()?;
        // SAFETY: the callers pass a live context, which holds its device.
        if !same(unsafe { (*context).device }, device) {
            return Err(ConnectionError::WrongDevice);
        }
        if port != self.port() {
            return Err(ConnectionError::WrongPort { queue_pair: port, route: self.port() });
        }
        Ok(())
    }
}

#[cfg(rdma_core_65)]
const NEEDS_WRITTEN_EVENTS: &str = "it takes Linux 6.18, with which programs write events";

impl AsFd for Id {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the borrowed channel owns the file.
        unsafe { BorrowedFd::borrow_raw(self.channel.fd()) }
    }
}

/// Compares the kernel's numbers, or the names if it gives none. A device that was removed and added again has a new
/// `struct ibv_device` and a new number.
fn same(one: *mut ffi::ibv_device, other: *mut ffi::ibv_device) -> bool {
    if one == other {
        return true;
    }
    // SAFETY: a context or a list holds each device.
    unsafe {
        let (a, b) = (ffi::ibv_get_device_index(one), ffi::ibv_get_device_index(other));
        if a >= 0 && b >= 0 { a == b } else { (*one).name == (*other).name }
    }
}

#[cfg(rdma_core_65)]
#[cold]
fn unresolved(verb: &'static str, code: i32, node: &CStr, service: &CStr) -> Error {
    let (node, service) = (node.to_string_lossy(), service.to_string_lossy());
    let (errno, reason) = match code {
        libc::EAI_SERVICE => (
            libc::ENOENT,
            "the service is not known: name it as /etc/services does, or by its port",
        ),
        libc::EAI_AGAIN => (libc::EAGAIN, "no name server answers: try again later"),
        libc::EAI_MEMORY => (libc::ENOMEM, "no memory to look up the name"),
        libc::EAI_FAIL => (libc::ENOENT, "the name server has failed"),
        _ => (libc::ENOENT, "the name is not known"),
    };
    let text = match code {
        libc::EAI_SERVICE => format!("{service:.64}: {reason}"),
        _ => format!("{node:.256}: {reason}"),
    };
    Error::with_text(verb, errno, text, reason)
}

/// Never 0, which some kernels take for no time-out.
fn milliseconds(timeout: Duration) -> i32 {
    i32::try_from(timeout.as_millis()).unwrap_or(i32::MAX).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_cut_to_what_c_can_say() {
        assert_eq!(milliseconds(Duration::ZERO), 1);
        assert_eq!(milliseconds(Duration::from_millis(1500)), 1500);
        assert_eq!(milliseconds(Duration::MAX), i32::MAX);
    }
}
