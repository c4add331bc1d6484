//! A connection that is established.

use std::fmt;
use std::net::SocketAddr;
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use super::connectable::sealed;
use super::event::{ConnectionEvent, ConnectionEventKind};
use super::id::Id;
use super::private_data::PrivateData;
use crate::device::event_file;
use crate::error::Result;
use crate::queue_pair::EnhancedConnection;

/// A queue pair or a channel that the connection manager has connected, with what is needed to hear of
/// its end.
///
/// It can be used like the [`QueuePair`](crate::QueuePair) or [`Channel`](crate::Channel) that it is.
/// Dropping it ends the connection, and the peer is told.
#[doc(alias = "rdma_destroy_id")]
#[doc(alias = "rdma_destroy_event_channel")]
pub struct Connection<Q> {
    object: Q,
    control: ConnectionControl,
}

impl<Q> Connection<Q> {
    pub(super) fn new(object: Q, id: Id, iwarp: bool, private_data: PrivateData) -> Self {
        let control = ConnectionControl { id, iwarp, ended: false, private_data };
        Self { object, control }
    }

    /// The bytes that the peer has answered with; none on the side that accepts, which has them from
    /// the request.
    pub fn private_data(&self) -> &PrivateData {
        &self.control.private_data
    }

    /// The address of the peer.
    pub fn peer_addr(&self) -> Option<SocketAddr> {
        self.control.peer_addr()
    }

    /// Our own address.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.control.local_addr()
    }

    /// What tells of the connection, for what it alone can say.
    pub fn control(&self) -> &ConnectionControl {
        &self.control
    }

    /// The two parts: what data is moved with, and what tells of the connection, which another thread
    /// can then watch.
    ///
    /// From then on nothing stops the queue pair by itself when the device is removed. Dropping the
    /// control ends the connection.
    pub fn into_parts(self) -> (Q, ConnectionControl) {
        (self.object, self.control)
    }
}

impl<Q: sealed::Connected> Connection<Q> {
    /// What has happened to the connection, if anything has and was not told yet. It does not wait: see
    /// [`as_fd`](Self::as_fd) for event loops, and [`event_timeout`](Self::event_timeout).
    ///
    /// The end of a connection is [`Disconnected`](ConnectionEventKind::Disconnected), or
    /// [`Rejected`](ConnectionEventKind::Rejected) on the side that has connected, if the other one has
    /// given up before it heard of that.
    ///
    /// When the device is removed ([`DeviceRemoved`](ConnectionEventKind::DeviceRemoved)), this stops
    /// the queue pair and then destroys the identifier of the connection, for which the kernel waits.
    /// Nothing more is told after that.
    ///
    /// # Errors
    ///
    ///  - `ENODEV`: the device was removed, and that was told before.
    #[doc(alias = "rdma_get_cm_event")]
    #[doc(alias = "rdma_ack_cm_event")]
    pub fn event(&mut self) -> Result<Option<ConnectionEvent>> {
        let Some(copied) = self.control.id.next()? else { return Ok(None) };
        self.ended(copied.public)
    }

    /// As [`event`](Self::event), but waits for something to happen, `timeout` at most.
    ///
    /// # Errors
    ///
    /// As of `event`, and
    ///
    ///  - `ETIMEDOUT`: nothing has.
    #[doc(alias = "rdma_get_cm_event")]
    pub fn event_timeout(&mut self, timeout: Duration) -> Result<ConnectionEvent> {
        let copied = self.control.id.next_before(event_file::deadline(timeout))?;
        Ok(self.ended(copied.public)?.unwrap_or(copied.public))
    }

    fn ended(&mut self, event: ConnectionEvent) -> Result<Option<ConnectionEvent>> {
        if event.kind() == ConnectionEventKind::DeviceRemoved {
            self.object.end();
        }
        self.control.note(event);
        Ok(Some(event))
    }

    /// `rdma_disconnect`: ends the connection, from either side. Everything that is in flight ends, and
    /// the peer is told. Both sides then hear of [`Disconnected`](ConnectionEventKind::Disconnected).
    ///
    /// Call this too when the peer has disconnected: the queue pair does not learn of that by itself
    /// on InfiniBand and RoCE, and receives would stay in flight for ever.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the connection is not there any more, though no event has told so.
    ///  - `ENODEV`: the device was removed.
    #[doc(alias = "rdma_disconnect")]
    pub fn disconnect(&mut self) -> Result<()> {
        if self.control.iwarp {
            // The kernel ends the stream with what was sent, and stops the queue pair.
            let told = self.control.disconnect();
            self.object.end();
            return told;
        }
        self.object.end();
        self.control.disconnect()
    }
}

impl<Q> Deref for Connection<Q> {
    type Target = Q;

    fn deref(&self) -> &Q {
        &self.object
    }
}

impl<Q> DerefMut for Connection<Q> {
    fn deref_mut(&mut self) -> &mut Q {
        &mut self.object
    }
}

impl<Q> AsFd for Connection<Q> {
    /// Readable when [`event`](Self::event) has something to tell.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.control.as_fd()
    }
}

impl<Q: fmt::Debug> fmt::Debug for Connection<Q> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection")
            .field("object", &self.object)
            .field("control", &self.control)
            .finish()
    }
}

/// What tells of a connection, without the queue pair: see [`Connection::into_parts`].
#[must_use = "dropping it ends the connection"]
pub struct ConnectionControl {
    id: Id,
    iwarp: bool,
    /// The end of the connection was told.
    ended: bool,
    private_data: PrivateData,
}

impl ConnectionControl {
    /// As [`Connection::event`]. When the device is removed, the queue pair is left alone: drop it.
    ///
    /// # Errors
    ///
    /// As of [`Connection::event`].
    #[doc(alias = "rdma_get_cm_event")]
    pub fn event(&mut self) -> Result<Option<ConnectionEvent>> {
        let event = self.id.next()?.map(|copied| copied.public);
        if let Some(event) = event {
            self.note(event);
        }
        Ok(event)
    }

    /// As [`Connection::event_timeout`].
    ///
    /// # Errors
    ///
    /// As of [`Connection::event_timeout`].
    #[doc(alias = "rdma_get_cm_event")]
    pub fn event_timeout(&mut self, timeout: Duration) -> Result<ConnectionEvent> {
        let event = self.id.next_before(event_file::deadline(timeout))?.public;
        self.note(event);
        Ok(event)
    }

    /// `rdma_disconnect`: ends the connection, and tells the peer. The queue pair goes on until it is
    /// stopped or dropped.
    ///
    /// # Errors
    ///
    /// As of [`Connection::disconnect`].
    #[doc(alias = "rdma_disconnect")]
    pub fn disconnect(&mut self) -> Result<()> {
        match self.id.disconnect() {
            // The peer was faster; the kernel has answered it already.
            Err(error) if self.ended && error.raw_os_error() != libc::ENODEV => Ok(()),
            result => result,
        }
    }

    /// `rdma_notify`: tells the connection manager that data has come, so the connection is established,
    /// though the peer's last message of the handshake was lost
    /// ([`CommunicationEstablished`](crate::AsyncEventKind::CommunicationEstablished)).
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the connection is not there any more.
    #[doc(alias = "rdma_notify")]
    pub fn notify_established(&mut self) -> Result<()> {
        self.id.notify_established()
    }

    /// `rdma_get_remote_ece`: the enhanced connection options that the peer has sent.
    ///
    /// # Errors
    ///
    ///  - `ENODEV`: the device was removed.
    #[doc(alias = "rdma_get_remote_ece")]
    pub fn remote_ece(&self) -> Result<EnhancedConnection> {
        self.id.remote_ece()
    }

    /// The address of the peer; none once the device was removed.
    #[doc(alias = "rdma_get_peer_addr")]
    #[doc(alias = "rdma_get_dst_port")]
    pub fn peer_addr(&self) -> Option<SocketAddr> {
        self.id.peer_addr()
    }

    /// Our own address; none once the device was removed.
    #[doc(alias = "rdma_get_local_addr")]
    #[doc(alias = "rdma_get_src_port")]
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.id.local_addr()
    }

    /// The C object, or null once the device was removed. To read its events by other means breaks the
    /// books of this object.
    pub fn as_raw(&self) -> *mut crate::ffi::rdma_cm_id {
        self.id.as_ptr()
    }

    fn note(&mut self, event: ConnectionEvent) {
        match event.kind() {
            ConnectionEventKind::Disconnected | ConnectionEventKind::Rejected => self.ended = true,
            ConnectionEventKind::DeviceRemoved => {
                // The kernel waits for this. One that cannot be destroyed is leaked.
                let _ = self.id.destroy();
            }
            _ => {}
        }
    }
}

impl AsFd for ConnectionControl {
    /// Readable when [`event`](Self::event) has something to tell.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.id.as_fd()
    }
}

impl fmt::Debug for ConnectionControl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConnectionControl")
            .field("local_addr", &self.local_addr())
            .field("peer_addr", &self.peer_addr())
            .field("iwarp", &self.iwarp)
            .finish_non_exhaustive()
    }
}
