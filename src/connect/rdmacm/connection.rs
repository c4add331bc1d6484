//! An established connection.

use std::fmt;
use std::net::SocketAddr;
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Instant;

use super::connectable::sealed;
use super::event::{ConnectionEvent, ConnectionEventKind};
use super::id::Id;
use super::private_data::PrivateData;
use crate::base::{Result, debug, getters};
use crate::verbs::queue_pair::EnhancedConnection;

/// A connected queue pair or channel, with the control part that reports the end of the connection.
///
/// It derefs to its [`QueuePair`](crate::QueuePair) or [`Channel`](crate::Channel). Dropping it ends the
/// connection and tells the peer.
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

    getters! { self,
        /// The private data of the peer's answer; empty on the side that accepts, which has them in the
        /// request.
        private_data: &PrivateData => &self.control.private_data;

        /// The address of the peer.
        peer_addr: Option<SocketAddr> => self.control.peer_addr();

        /// Our own address.
        local_addr: Option<SocketAddr> => self.control.local_addr();

        /// The control part, which has further methods.
        control: &ConnectionControl => &self.control;
    }

    /// Splits the connection into the queue pair or channel, and the control part. Another thread can use the
    /// control part, also while a future of an asynchronous channel is awaited.
    ///
    /// A channel in a [`Loop`](crate::Loop), and an [`AsyncChannel`](crate::AsyncChannel), still notice that the peer has
    /// left, unless the program reads the event first: then it ends the channel itself.
    ///
    /// After that no event stops the queue pair when the device is removed. The reactor of an
    /// [`AsyncChannel`](crate::AsyncChannel) ends its operations; drop a [`Channel`](crate::Channel) or a
    /// queue pair. Dropping the control part ends the connection.
    pub fn into_parts(self) -> (Q, ConnectionControl) {
        (self.object, self.control)
    }
}

impl<Q: sealed::Connected> Connection<Q> {
    /// The next event, or `None`, without waiting.
    ///
    /// A connection ends with [`Disconnected`](ConnectionEventKind::Disconnected). The side that connected
    /// may get [`Rejected`](ConnectionEventKind::Rejected) instead, if the other side gave up before it knew
    /// of the connection.
    ///
    /// When the device is removed ([`DeviceRemoved`](ConnectionEventKind::DeviceRemoved)), this stops the
    /// queue pair and destroys the identifier, for which the kernel waits. No event follows.
    ///
    /// # Errors
    ///
    ///  - `ENODEV`: the device was removed, and an earlier call has reported that.
    #[doc(alias = "rdma_get_cm_event")]
    #[doc(alias = "rdma_ack_cm_event")]
    pub fn event(&mut self) -> Result<Option<ConnectionEvent>> {
        let copied = self.control.id.next()?;
        Ok(copied.map(|copied| self.note(copied.public)))
    }

    /// Waits for an [`event`](Self::event), not after `deadline`.
    ///
    /// # Errors
    ///
    /// Those of `event`; `ETIMEDOUT`: there was no event.
    pub fn event_until(&mut self, deadline: Instant) -> Result<ConnectionEvent> {
        let copied = self.control.id.next_before(Some(deadline))?;
        Ok(self.note(copied.public))
    }

    fn note(&mut self, event: ConnectionEvent) -> ConnectionEvent {
        if event.kind() == ConnectionEventKind::DeviceRemoved {
            self.object.end();
        }
        self.control.note(event)
    }

    /// `rdma_disconnect`: ends the connection and everything in flight, and tells the peer. Both sides get
    /// [`Disconnected`](ConnectionEventKind::Disconnected).
    ///
    /// Call this also after the peer has disconnected: on InfiniBand and RoCE the queue pair does not notice,
    /// and receives would stay in flight for ever.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the connection no longer exists, although no event has reported its end.
    ///  - `ENODEV`: the device was removed.
    #[doc(alias = "rdma_disconnect")]
    pub fn disconnect(&mut self) -> Result<()> {
        if self.control.iwarp {
            // The kernel sends what is left, ends the stream, and stops the queue pair.
            let disconnected = self.control.disconnect();
            self.object.end();
            return disconnected;
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
    /// Readable when there is an [`event`](Self::event).
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.control.as_fd()
    }
}

debug! { impl[Q: fmt::Debug] Connection<Q>, self, object: self.object, control: self.control }

/// The control part of a connection: see [`Connection::into_parts`].
#[must_use = "dropping it ends the connection"]
pub struct ConnectionControl {
    id: Id,
    iwarp: bool,
    ended: bool,
    private_data: PrivateData,
}

impl ConnectionControl {
    /// [`Connection::event`], but leaves the queue pair alone when the device is removed: drop it.
    ///
    /// # Errors
    ///
    /// Those of [`Connection::event`].
    #[doc(alias = "rdma_get_cm_event")]
    pub fn event(&mut self) -> Result<Option<ConnectionEvent>> {
        let copied = self.id.next()?;
        Ok(copied.map(|copied| self.note(copied.public)))
    }

    /// [`Connection::event_until`].
    ///
    /// # Errors
    ///
    /// Those of [`Connection::event_until`].
    pub fn event_until(&mut self, deadline: Instant) -> Result<ConnectionEvent> {
        let copied = self.id.next_before(Some(deadline))?;
        Ok(self.note(copied.public))
    }

    /// `rdma_disconnect`: ends the connection, and tells the peer. The queue pair runs until it is stopped or
    /// dropped.
    ///
    /// # Errors
    ///
    /// Those of [`Connection::disconnect`].
    #[doc(alias = "rdma_disconnect")]
    pub fn disconnect(&mut self) -> Result<()> {
        match self.id.disconnect() {
            // The peer disconnected first, and the kernel has answered it.
            Err(error) if self.ended && error.errno() != libc::ENODEV => Ok(()),
            result => result,
        }
    }

    /// `rdma_notify`: reports that data has arrived
    /// ([`CommunicationEstablished`](crate::device::AsyncEventKind::CommunicationEstablished)). That
    /// establishes the connection if the handshake's last message was lost.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the connection no longer exists.
    #[doc(alias = "rdma_notify")]
    pub fn notify_established(&mut self) -> Result<()> {
        self.id.notify_established()
    }

    /// `rdma_write_cm_event`: writes a [`User`](ConnectionEventKind::User) event for the next
    /// [`event`](Self::event), to wake the thread that waits for the file. Needs rdma-core 65.
    ///
    /// # Errors
    ///
    ///  - `EOPNOTSUPP`: the kernel is older than Linux 6.18.
    ///  - `ENODEV`: the device was removed.
    #[cfg(rdma_core_65)]
    #[doc(alias = "rdma_write_cm_event")]
    pub fn write_event(&self, status: i32, argument: u64) -> Result<()> {
        self.id.write_event(status, argument)
    }

    getters! { self,
        /// `rdma_get_remote_ece`: the peer's enhanced connection options.
        ///
        /// # Errors
        ///
        ///  - `ENODEV`: the device was removed.
        #[doc(alias = "rdma_get_remote_ece")]
        remote_ece: Result<EnhancedConnection> => self.id.remote_ece();

        /// The address of the peer; none once the device was removed.
        #[doc(alias = "rdma_get_peer_addr")]
        #[doc(alias = "rdma_get_dst_port")]
        peer_addr: Option<SocketAddr> => self.id.peer_addr();

        /// Our own address; none once the device was removed.
        #[doc(alias = "rdma_get_local_addr")]
        #[doc(alias = "rdma_get_src_port")]
        local_addr: Option<SocketAddr> => self.id.local_addr();

        /// The C object, or null once the device was removed. Do not read its events: this object would miss
        /// them.
        as_raw: *mut crate::base::ffi::rdma_cm_id => self.id.as_ptr();
    }

    fn note(&mut self, event: ConnectionEvent) -> ConnectionEvent {
        match event.kind() {
            ConnectionEventKind::Disconnected | ConnectionEventKind::Rejected => self.ended = true,
            ConnectionEventKind::DeviceRemoved => {
                // The kernel waits for the destroy. If that fails, the identifier is leaked.
                let _ = self.id.destroy();
            }
            _ => {}
        }
        event
    }
}

impl AsFd for ConnectionControl {
    /// Readable when there is an [`event`](Self::event).
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.id.as_fd()
    }
}

debug! {
    ConnectionControl, self,
    local_addr: self.local_addr(), peer_addr: self.peer_addr(), iwarp: self.iwarp, ..
}
