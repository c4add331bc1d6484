//! Multicast groups, joined by their IP address.

use std::net::{IpAddr, SocketAddr};
use std::time::Instant;

use super::datagram::{DatagramAddress, activate};
use super::error::ConnectionError;
use super::event::ConnectionEventKind;
use super::id::Id;
use crate::debug::debug;
use crate::device::{Context, Gid};
use crate::error::{Error, Result};
use crate::ffi;
use crate::queue_pair::{Datagram, PreparedQueuePair, QueuePair};

/// The membership in a multicast group. It ends when this is dropped.
///
/// To receive from the group, [attach](QueuePair::attach_multicast) a UD queue pair to it. To send, only
/// the [address](Self::peer) is needed.
pub struct MulticastMembership {
    id: Id,
    group: SocketAddr,
    peer: DatagramAddress,
    /// Whether the kernel has the group for us.
    joined: bool,
}

impl Drop for MulticastMembership {
    fn drop(&mut self) {
        if self.joined {
            // If it fails, destroying the identifier leaves the group.
            let _ = self.id.leave_multicast(self.group);
        }
    }
}

impl MulticastMembership {
    /// `rdma_join_multicast`: joins `group`, an IPv4 or IPv6 multicast address, through the device that
    /// our address `local` belongs to, before `deadline`.
    ///
    /// # Errors
    ///
    ///  - [`Verbs`](ConnectionError::Verbs): `EINVAL`: `group` is no multicast address, or is of another
    ///    family than `local`. `ENODEV`, `EADDRNOTAVAIL`: `local` is not the address of an RDMA device.
    ///  - [`Failed`](ConnectionError::Failed): the group cannot be joined.
    ///  - [`TimedOut`](ConnectionError::TimedOut): the time limit has passed.
    #[doc(alias = "rdma_join_multicast")]
    #[doc(alias = "rdma_join_multicast_ex")]
    pub fn join(local: IpAddr, group: IpAddr, deadline: Instant) -> Result<Self, ConnectionError> {
        Self::join_as(local, group, false, deadline)
    }

    /// As [`join`](Self::join), but only to send to the group.
    ///
    /// # Errors
    ///
    /// Those of `join`, and `EOPNOTSUPP` if the fabric does not support send-only members.
    #[doc(alias = "rdma_join_multicast_ex")]
    pub fn join_to_send(
        local: IpAddr,
        group: IpAddr,
        deadline: Instant,
    ) -> Result<Self, ConnectionError> {
        Self::join_as(local, group, true, deadline)
    }

    fn join_as(
        local: IpAddr,
        group: IpAddr,
        send_only: bool,
        deadline: Instant,
    ) -> Result<Self, ConnectionError> {
        const VERB: &str = "rdma_join_multicast";
        let reason = "the group's address is not a multicast address";
        Error::invalid_if(!group.is_multicast(), VERB, reason)?;
        let reason = "one address is an IPv4 address and the other an IPv6 address";
        Error::invalid_if(group.is_ipv4() != local.is_ipv4(), VERB, reason)?;
        let reason = "the local address must be that of a device";
        Error::invalid_if(local.is_unspecified(), VERB, reason)?;
        let group = SocketAddr::new(group, 0);
        let mut id = Id::new(ffi::rdma_port_space::RDMA_PS_UDP)?;
        id.bind(SocketAddr::new(local, 0))?;
        id.join_multicast(group, send_only)?;
        loop {
            let event = match id.next_before(Some(deadline)) {
                Ok(event) => event,
                Err(error) => {
                    let _ = id.leave_multicast(group);
                    return Err(error.into());
                }
            };
            match event.kind() {
                ConnectionEventKind::MulticastJoined => {
                    let peer = DatagramAddress::new(&event);
                    return Ok(Self { id, group, peer, joined: true });
                }
                ConnectionEventKind::AddressChanged | ConnectionEventKind::Unknown(_) => {}
                _ => {
                    let _ = id.leave_multicast(group);
                    return Err(event.error());
                }
            }
        }
    }

    /// Opens the device through which the group was joined.
    ///
    /// # Errors
    ///
    /// Those of [`Device::open`](crate::Device::open).
    pub fn open_device(&self) -> Result<Context<'static>> {
        self.id.open_device()
    }

    /// The port of the device through which the group was joined.
    pub fn port(&self) -> u8 {
        self.id.port()
    }

    /// Makes a UD queue pair ready, with the Q_Key of the group.
    ///
    /// # Errors
    ///
    /// Those of [`DatagramRoute::activate`](crate::rdmacm::DatagramRoute::activate).
    pub fn activate<'res, T: Datagram>(
        &mut self,
        prepared: PreparedQueuePair<'res, T>,
    ) -> Result<QueuePair<'res, T>, ConnectionError> {
        activate(&mut self.id, prepared)
    }

    /// The group as an address to send to: its path, queue pair number and Q_Key.
    pub fn peer(&self) -> &DatagramAddress {
        &self.peer
    }

    /// The GID of the group, for [`QueuePair::attach_multicast`].
    pub fn gid(&self) -> Gid {
        self.peer.path().gid().unwrap_or(Gid::ZERO)
    }

    /// The LID of the group, for [`QueuePair::attach_multicast`]; 0 on RoCE.
    pub fn lid(&self) -> u16 {
        self.peer.path().lid()
    }

    /// `rdma_leave_multicast`: leaves the group and reports a failure. Dropping ignores a failure. Detach
    /// queue pairs before.
    ///
    /// # Errors
    ///
    ///  - `ENODEV`: the device was removed.
    #[doc(alias = "rdma_leave_multicast")]
    pub fn leave(mut self) -> Result<()> {
        self.joined = false;
        self.id.leave_multicast(self.group)
    }
}

debug! { MulticastMembership, self, group: self.group.ip(), peer: self.peer, .. }
