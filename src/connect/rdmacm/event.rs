//! Events of the connection manager, copied and acknowledged when they are read.

use std::fs::File;
use std::os::fd::RawFd;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::ptr::NonNull;
use std::time::Instant;
use std::{fs, io, ptr, slice};

use super::WAIT;
use super::private_data::PrivateData;
use crate::base::{Error, Result, c_enum, ffi, getters};
use crate::verbs::device::{event_file, fork, no_device_for};

c_enum! {
    /// `enum rdma_cm_event_type`: the kind of an event.
    #[doc(alias = "rdma_cm_event_type")]
    #[doc(alias = "rdma_event_str")]
    pub enum ConnectionEventKind: rdma_cm_event_type(u32) {
        /// The device and hardware address were found.
        AddressResolved = RDMA_CM_EVENT_ADDR_RESOLVED,
        /// They were not found.
        AddressError = RDMA_CM_EVENT_ADDR_ERROR,
        /// The path was found.
        RouteResolved = RDMA_CM_EVENT_ROUTE_RESOLVED,
        /// The path was not found.
        RouteError = RDMA_CM_EVENT_ROUTE_ERROR,
        /// A peer wants to connect.
        ConnectRequest = RDMA_CM_EVENT_CONNECT_REQUEST,
        /// The peer accepted, and waits for our confirmation.
        ConnectResponse = RDMA_CM_EVENT_CONNECT_RESPONSE,
        /// The connection could not be established.
        ConnectError = RDMA_CM_EVENT_CONNECT_ERROR,
        /// The peer does not answer.
        Unreachable = RDMA_CM_EVENT_UNREACHABLE,
        /// The peer has rejected the connection.
        Rejected = RDMA_CM_EVENT_REJECTED,
        /// The connection is established.
        Established = RDMA_CM_EVENT_ESTABLISHED,
        /// The peer or we ended the connection.
        Disconnected = RDMA_CM_EVENT_DISCONNECTED,
        /// The device is going away.
        DeviceRemoved = RDMA_CM_EVENT_DEVICE_REMOVAL,
        /// A multicast group was joined.
        MulticastJoined = RDMA_CM_EVENT_MULTICAST_JOIN,
        /// A multicast group was not joined, or was lost.
        MulticastError = RDMA_CM_EVENT_MULTICAST_ERROR,
        /// Our address moved to another network device, as when a bond fails over.
        AddressChanged = RDMA_CM_EVENT_ADDR_CHANGE,
        /// No packet of the connection can be on its way any more, so the queue pair's number is free.
        TimeWaitExit = RDMA_CM_EVENT_TIMEWAIT_EXIT,
        /// The addresses of a name were found.
        NameResolved = RDMA_CM_EVENT_ADDRINFO_RESOLVED,
        /// They were not found.
        NameError = RDMA_CM_EVENT_ADDRINFO_ERROR,
        /// The program [wrote](crate::rdmacm::ConnectionControl::write_event) it.
        User = RDMA_CM_EVENT_USER,
    }
}

/// `struct rdma_cm_event`: an event of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[doc(alias = "rdma_cm_event")]
pub struct ConnectionEvent {
    pub(super) kind: ConnectionEventKind,
    pub(super) status: i32,
    pub(super) private_data: PrivateData,
    pub(super) argument: u64,
}

impl ConnectionEvent {
    getters! { self,
        /// The kind of the event.
        kind: ConnectionEventKind => self.kind;

        /// The status: 0, a negative errno value, or a reason code of the InfiniBand specification.
        status: i32 => self.status;

        /// The number that was [written](crate::rdmacm::ConnectionControl::write_event) with a
        /// [`User`](ConnectionEventKind::User) event; 0 for others.
        argument: u64 => self.argument;

        /// The peer's private data, such as in the event that ends the connection.
        private_data: &PrivateData => &self.private_data;
    }
}

#[derive(Clone, Copy)]
pub(super) struct Copied {
    pub(super) public: ConnectionEvent,
    /// The identifier of a request; the reader of the event owns it.
    pub(super) request: Option<NonNull<ffi::rdma_cm_id>>,
    /// Set for connections.
    pub(super) responder_resources: u8,
    pub(super) initiator_depth: u8,
    /// Set for datagrams.
    pub(super) path: ffi::ibv_ah_attr,
    pub(super) qkey: u32,
    pub(super) queue_pair: u32,
}

impl Copied {
    /// # Safety
    ///
    /// The event was read and is not acknowledged yet.
    pub(super) unsafe fn of(event: *const ffi::rdma_cm_event) -> Self {
        use ConnectionEventKind as Kind;

        // SAFETY: the caller has not acknowledged the event, so it and its identifier are live.
        let (event, port_space) = unsafe { (&*event, (*(*event).id).ps) };
        let kind = Kind::from(event.event);
        let multicast = matches!(kind, Kind::MulticastJoined | Kind::MulticastError);
        // librdmacm fills in `conn` for these in every port space.
        let of_connection = matches!(kind, Kind::Rejected | Kind::Disconnected);
        let datagram = !of_connection
            && matches!(
                port_space,
                ffi::rdma_port_space::RDMA_PS_UDP | ffi::rdma_port_space::RDMA_PS_IPOIB
            );
        let mut copied = Self {
            public: ConnectionEvent {
                kind,
                status: event.status,
                private_data: PrivateData::EMPTY,
                argument: 0,
            },
            request: (kind == Kind::ConnectRequest).then(|| NonNull::new(event.id)).flatten(),
            responder_resources: 0,
            initiator_depth: 0,
            path: ffi::ibv_ah_attr::default(),
            qkey: 0,
            queue_pair: 0,
        };
        if let Kind::NameResolved | Kind::NameError | Kind::User = kind {
            #[cfg(rdma_core_65)]
            if kind == Kind::User {
                // SAFETY: librdmacm has filled it in.
                copied.public.argument = unsafe { event.param.arg };
            }
            return copied;
        }
        let (data, len) = if datagram || multicast {
            // SAFETY: librdmacm fills in the zeroed union, which has only integers.
            let ud = unsafe { event.param.ud };
            (copied.path, copied.qkey, copied.queue_pair) = (ud.ah_attr, ud.qkey, ud.qp_num);
            (ud.private_data, ud.private_data_len)
        } else {
            // SAFETY: as above.
            let conn = unsafe { event.param.conn };
            copied.responder_resources = conn.responder_resources;
            copied.initiator_depth = conn.initiator_depth;
            copied.queue_pair = conn.qp_num;
            (conn.private_data, conn.private_data_len)
        };
        // In multicast events this is our own pointer.
        if !multicast && !data.is_null() {
            // SAFETY: librdmacm guarantees that this number of bytes is in the event.
            let bytes = unsafe { slice::from_raw_parts(data.cast::<u8>(), len.into()) };
            copied.public.private_data = PrivateData::new(bytes);
        }
        copied
    }

    pub(super) fn kind(&self) -> ConnectionEventKind {
        self.public.kind
    }
}

/// The file of the kernel module `rdma_ucm`.
const FILE: &str = "/dev/infiniband/rdma_cm";

/// A listener's channel also has the requests, until each moves to its own.
#[derive(Debug)]
pub(super) struct EventChannel {
    raw: NonNull<ffi::rdma_event_channel>,
}

// SAFETY: librdmacm's functions may be called on any thread; what changes the channel takes `&mut self`.
unsafe impl Send for EventChannel {}
// SAFETY: as above.
unsafe impl Sync for EventChannel {}

impl Drop for EventChannel {
    fn drop(&mut self) {
        // SAFETY: the channel is live, and no identifier uses it: each owns its channel, and is destroyed first.
        unsafe { ffi::rdma_destroy_event_channel(self.raw.as_ptr()) }
    }
}

impl EventChannel {
    /// Reads do not block.
    ///
    /// # Errors
    ///
    ///  - `ENOENT`, `EACCES`, `EPERM`, `ENXIO`: the file is missing, wrong, or may not be opened.
    ///  - `ENODEV`: the machine has no RDMA device.
    ///  - `EMFILE`, `ENFILE`, `ENOMEM`: a resource has run out.
    pub(super) fn new() -> Result<Self> {
        const VERB: &str = "rdma_create_event_channel";
        let raw = {
            // librdmacm lists the devices, and opens one when it resolves an address.
            let mut opened = fork::exclusive();
            *opened = true;
            ffi::set_errno(0);
            // SAFETY: no requirements.
            ffi::object(VERB, unsafe { ffi::rdma_create_event_channel() })
        };
        let channel = Self { raw: raw.map_err(explain)? };
        event_file::set_nonblocking(VERB, channel.fd())?;
        Ok(channel)
    }

    pub(super) fn as_ptr(&self) -> *mut ffi::rdma_event_channel {
        self.raw.as_ptr()
    }

    pub(super) fn fd(&self) -> RawFd {
        // SAFETY: the channel is live.
        unsafe { (*self.raw.as_ptr()).fd }
    }

    /// Acknowledges the event at once, because destroying an identifier waits for that.
    pub(super) fn next(&mut self) -> Result<Option<Copied>> {
        const VERB: &str = "rdma_get_cm_event";
        let mut event = ptr::null_mut();
        // SAFETY: the channel is live, and the pointer is ours. `&mut self` keeps others from reading or destroying an
        // event's identifier.
        let read = || unsafe { ffi::rdma_get_cm_event(self.raw.as_ptr(), &mut event) };
        if !event_file::read_event(VERB, read)? {
            return Ok(None);
        }
        // SAFETY: the event was read just now and is not acknowledged.
        let copied = unsafe { Copied::of(event) };
        // SAFETY: the event was read once and is not used after this. The call cannot fail.
        unsafe { ffi::rdma_ack_cm_event(event) };
        Ok(Some(copied))
    }

    /// Waits forever without a deadline.
    ///
    /// # Errors
    ///
    ///  - `ETIMEDOUT` of [`WAIT`]: `deadline` has passed.
    pub(super) fn next_before(&mut self, deadline: Option<Instant>) -> Result<Copied> {
        event_file::take_before(WAIT, self.fd(), deadline, || self.next())
    }
}

#[cold]
fn explain(error: Error) -> Error {
    let reason = |errno, reason| Error::with_reason(error.verb(), errno, reason);
    match error.errno() {
        libc::EMFILE | libc::ENFILE | libc::ENOMEM => error,
        libc::ENODEV => no_device_for(error.verb()),
        // librdmacm does not report why it could not open the file.
        errno => match fs::metadata(Path::new(FILE)) {
            Err(_) => reason(
                libc::ENOENT,
                "there is no file /dev/infiniband/rdma_cm: load the kernel's module rdma_ucm \
                 (modprobe rdma_ucm), and pass the file to this container if it is one",
            ),
            Ok(file) if !file.file_type().is_char_device() => reason(
                libc::ENXIO,
                "/dev/infiniband/rdma_cm is not the device of the kernel's module rdma_ucm: remove \
                 it, and load the module (modprobe rdma_ucm)",
            ),
            Ok(_) => match File::options().read(true).write(true).open(FILE) {
                Err(denied) if denied.kind() == io::ErrorKind::PermissionDenied => reason(
                    denied.raw_os_error().unwrap_or(libc::EACCES),
                    "the process may not open /dev/infiniband/rdma_cm",
                ),
                _ => reason(
                    if errno == libc::ENOENT { libc::ENXIO } else { errno },
                    "/dev/infiniband/rdma_cm cannot be used: is the kernel's module rdma_ucm loaded?",
                ),
            },
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_kinds_are_kept() {
        let raw = ffi::rdma_cm_event_type(99);
        assert_eq!(ConnectionEventKind::from(raw), ConnectionEventKind::Unknown(99));
        assert_eq!(ffi::rdma_cm_event_type::from(ConnectionEventKind::Unknown(99)), raw);
    }

    #[cfg(rdma_core_65)]
    #[test]
    fn the_number_of_an_event_is_no_data() {
        let mut id = ffi::rdma_cm_id::default();
        for (kind, argument) in [(16, 0), (17, 0), (18, 77)] {
            let mut event = ffi::rdma_cm_event {
                id: &raw mut id,
                event: ffi::rdma_cm_event_type(kind),
                ..Default::default()
            };
            event.param.conn.private_data_len = 9;
            event.param.arg = 77;
            // SAFETY: the event is ours, and filled in as librdmacm would.
            let copied = unsafe { Copied::of(&event) }.public;
            assert_eq!((copied.argument(), copied.private_data().len()), (argument, 0));
        }
    }

    #[test]
    fn what_is_read_of_an_event_is_what_its_kind_has() {
        let mut id = ffi::rdma_cm_id::default();
        let bytes = *b"private";
        for kind in (0..=15).chain([20, u32::MAX]) {
            for space in [0x106, 0x111, 0x2, 0x13f, 9] {
                id.ps = ffi::rdma_port_space(space);
                let mut event = ffi::rdma_cm_event {
                    id: &raw mut id,
                    event: ffi::rdma_cm_event_type(kind),
                    status: -7,
                    ..Default::default()
                };
                let datagram = [0x111, 0x2].contains(&space) && ![8, 10].contains(&kind);
                let multicast = [12, 13].contains(&kind);
                if datagram || multicast {
                    event.param.ud = ffi::rdma_ud_param {
                        private_data: bytes.as_ptr().cast(),
                        private_data_len: 7,
                        qp_num: 5,
                        qkey: 6,
                        ..Default::default()
                    };
                } else {
                    event.param.conn = ffi::rdma_conn_param {
                        private_data: bytes.as_ptr().cast(),
                        private_data_len: 7,
                        responder_resources: 3,
                        initiator_depth: 4,
                        qp_num: 5,
                        ..Default::default()
                    };
                }
                // SAFETY: the event is ours, and filled in as librdmacm would.
                let copied = unsafe { Copied::of(&event) };
                assert_eq!((copied.queue_pair, copied.public.status()), (5, -7));
                assert_eq!(copied.request.is_some(), kind == 4);
                let data = copied.public.private_data();
                assert_eq!(&data[..], if multicast { &b""[..] } else { &bytes[..] });
                let rest = (copied.responder_resources, copied.initiator_depth, copied.qkey);
                assert_eq!(rest, if datagram || multicast { (0, 0, 6) } else { (3, 4, 0) });
            }
        }
    }
}
