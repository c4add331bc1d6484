//! Waiting for peers that want to connect.

use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Instant;

use super::connecting::Offer;
use super::event::{ConnectionEventKind, Copied};
use super::event_channel::EventChannel;
use super::id::Id;
use super::request::ConnectionRequest;
use crate::debug::debug;
use crate::error::Result;
use crate::ffi;
use crate::fields::setters;

/// How to listen: see [`Listener::builder`].
#[derive(Clone, Debug)]
#[must_use]
pub struct ListenerBuilder {
    address: SocketAddr,
    backlog: u32,
    reuse_address: bool,
    only_ipv6: bool,
}

impl ListenerBuilder {
    setters! { self,
        /// How many requests may wait in the queue (128 unless set). Further ones are not answered, and the
        /// peers' kernels try again some seconds later; on iWARP they are rejected. 0 stands for the maximum
        /// that the kernel allows (`net.rdma_ucm.max_backlog`).
        backlog(value: u32) => self.backlog = value;

        /// `RDMA_OPTION_ID_REUSEADDR`: whether the address may be in use already (not unless set).
        #[doc(alias = "rdma_set_option")]
        #[doc(alias = "RDMA_OPTION_ID_REUSEADDR")]
        reuse_address(value: bool) => self.reuse_address = value;

        /// `RDMA_OPTION_ID_AFONLY`: whether the IPv6 address `::` stands for IPv6 alone (not unless set).
        #[doc(alias = "RDMA_OPTION_ID_AFONLY")]
        only_ipv6(value: bool) => self.only_ipv6 = value;
    }

    /// `rdma_bind_addr`, `rdma_listen`: listens for connections.
    ///
    /// # Errors
    ///
    ///  - `EADDRINUSE`: something listens there already.
    ///  - `EADDRNOTAVAIL`, `ENODEV`: the address is not ours, or not that of an RDMA device.
    ///  - `EACCES`: the port is a privileged one.
    ///  - `ENOENT`, `EACCES` and others of `rdma_create_event_channel`: `/dev/infiniband/rdma_cm` is
    ///    missing, wrong, or may not be opened.
    #[doc(alias = "rdma_bind_addr")]
    #[doc(alias = "rdma_listen")]
    pub fn bind(self) -> Result<Listener> {
        Ok(Listener { requests: self.bind_in(ffi::rdma_port_space::RDMA_PS_TCP)? })
    }

    pub(super) fn bind_in(self, port_space: ffi::rdma_port_space) -> Result<Requests> {
        let mut id = Id::new(port_space)?;
        if self.reuse_address {
            id.set_option(ffi::RDMA_OPTION_ID_REUSEADDR.0, 1_i32)?;
        }
        if self.only_ipv6 {
            id.set_option(ffi::RDMA_OPTION_ID_AFONLY.0, 1_i32)?;
        }
        id.bind(self.address)?;
        id.listen(self.backlog)?;
        Ok(Requests { id, spare: None })
    }
}

/// Waits for peers that want to connect to an address.
///
/// ```no_run
/// # // needs a peer
/// use std::time::{Duration, Instant};
/// use ibverbs::rdmacm::Listener;
/// use ibverbs::Channel;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let mut listener = Listener::bind("10.77.0.1:7471".parse()?)?;
/// let request = listener.next()?;
/// let context = request.open_device()?;
/// let domain = context.alloc_pd()?;
/// let prepared = Channel::builder(&domain).port(request.port()).build()?;
/// let mut channel = request.accept(prepared, b"", Instant::now() + Duration::from_secs(5))?;
/// # Ok(())
/// # }
/// ```
#[doc(alias = "rdma_create_event_channel")]
#[doc(alias = "rdma_create_id")]
pub struct Listener {
    requests: Requests,
}

impl Listener {
    /// Begins to listen: see [`ListenerBuilder`].
    pub fn builder(address: SocketAddr) -> ListenerBuilder {
        ListenerBuilder { address, backlog: 128, reuse_address: false, only_ipv6: false }
    }

    /// As [`ListenerBuilder::bind`], without options. Port 0 leaves the port to the kernel; `0.0.0.0` and
    /// `::` stand for the addresses of all devices.
    ///
    /// # Errors
    ///
    /// Those of [`ListenerBuilder::bind`].
    pub fn bind(address: SocketAddr) -> Result<Self> {
        Self::builder(address).bind()
    }

    /// The address that it listens at, with the port that the kernel has chosen.
    #[doc(alias = "rdma_get_local_addr")]
    #[doc(alias = "rdma_get_src_port")]
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.requests.id.local_addr()
    }

    /// Waits for a peer that wants to connect.
    ///
    /// # Errors
    ///
    ///  - `EMFILE`, `ENFILE`, `ENOMEM`: the process can open no file for the request, which stays queued.
    ///  - `ENODEV`: the device that the address belongs to was removed.
    #[doc(alias = "rdma_migrate_id")]
    #[expect(clippy::should_implement_trait, reason = "it never ends, and may fail and go on")]
    pub fn next(&mut self) -> Result<ConnectionRequest> {
        self.requests.next_before(None).map(request)
    }

    /// As [`next`](Self::next), but not after `deadline`.
    ///
    /// # Errors
    ///
    /// Those of `next`, and
    ///
    ///  - `ETIMEDOUT`: no peer came.
    pub fn next_until(&mut self, deadline: Instant) -> Result<ConnectionRequest> {
        self.requests.next_before(Some(deadline)).map(request)
    }

    /// As [`next`](Self::next), but does not wait: for event loops, when the file is readable.
    ///
    /// # Errors
    ///
    /// Those of `next`.
    pub fn try_next(&mut self) -> Result<Option<ConnectionRequest>> {
        Ok(self.requests.try_next()?.map(request))
    }
}

fn request((id, event): (Id, Copied)) -> ConnectionRequest {
    let Copied { responder_resources, initiator_depth, .. } = event;
    let (credit_word, private_data) = event.public.private_data.split();
    let offer = Offer { responder_resources, initiator_depth, credit_word };
    ConnectionRequest::new(id, offer, private_data)
}

impl AsFd for Listener {
    /// Readable when [`try_next`](Self::try_next) has something to do.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.requests.id.as_fd()
    }
}

debug! { Listener, self, local_addr: self.local_addr(), .. }

/// The requests that arrive at an address, each moved to a channel of its own.
pub(super) struct Requests {
    pub(super) id: Id,
    /// The channel of the next request: opened before the request is read, so that no request is lost if
    /// the process can open no more files.
    spare: Option<EventChannel>,
}

impl Requests {
    pub(super) fn next_before(&mut self, deadline: Option<Instant>) -> Result<(Id, Copied)> {
        loop {
            let spare = self.take_spare()?;
            match self.id.next_before(deadline) {
                Ok(event) => {
                    if let Some(request) = self.take(event, spare)? {
                        return Ok(request);
                    }
                }
                Err(error) => {
                    self.spare = Some(spare);
                    return Err(error);
                }
            }
        }
    }

    pub(super) fn try_next(&mut self) -> Result<Option<(Id, Copied)>> {
        loop {
            let spare = self.take_spare()?;
            match self.id.next() {
                Ok(Some(event)) => {
                    if let Some(request) = self.take(event, spare)? {
                        return Ok(Some(request));
                    }
                }
                nothing => {
                    self.spare = Some(spare);
                    return nothing.map(|_| None);
                }
            }
        }
    }

    fn take_spare(&mut self) -> Result<EventChannel> {
        self.spare.take().map_or_else(EventChannel::new, Ok)
    }

    /// The request of an event, if it is one, moved to `spare`.
    fn take(&mut self, event: Copied, spare: EventChannel) -> Result<Option<(Id, Copied)>> {
        if let Some(raw) = event.request {
            // SAFETY: the identifier came with the event, which nothing else has seen and which is
            // acknowledged; it is on our channel.
            let id = unsafe { Id::migrate(raw, spare) }?;
            return Ok(Some((id, event)));
        }
        self.spare = Some(spare);
        if event.kind() == ConnectionEventKind::DeviceRemoved {
            // The kernel waits until the identifier is destroyed. After this, every call fails.
            let _ = self.id.destroy();
        }
        Ok(None)
    }
}
