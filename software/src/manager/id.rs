//! An identifier: `struct rdma_cm_id` as the kernel knows it.

use std::ffi::c_int;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use super::abi::{Answer, PS_UDP};
use super::file::Queue;
use super::names::Claim;
use super::places::Place;
use crate::transport::connection::{Attributes, LIFETIME};
use crate::transport::queue_pair::Transport;
use crate::transport::work::Path;
use crate::wire::header::PKEY;
use crate::wire::management::{IpHeader, gid};

/// The Q_Key of the port space of datagrams.
pub(super) const UDP_QKEY: u32 = 0x0123_4567;

/// The hop limit of what is sent.
const HOPS: u8 = 64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Idle,
    Bound,
    Resolved,
    Routed,
    Listening,
    /// The connection of its device.
    Connected(u32),
    Over,
}

#[derive(Debug)]
pub(super) struct Id {
    pub(super) handle: u32,
    pub(super) uid: u64,
    pub(super) queue: Arc<Queue>,
    pub(super) space: u16,
    /// The kind of its queue pair, as verbs number it.
    pub(super) kind: u8,
    pub(super) state: State,
    pub(super) source: Option<SocketAddr>,
    pub(super) destination: Option<SocketAddr>,
    /// The address of the peer's device.
    pub(super) peer: Option<IpAddr>,
    pub(super) place: Option<Place>,
    /// Whether it came from a listener, whose port it has.
    pub(super) is_child: bool,
    /// Its port, while that is one of the machine: one for each family of addresses.
    pub(super) claims: Vec<Claim>,
    /// How many of its events were read.
    pub(super) reported: u32,
    /// How many more requests may wait at a listener.
    pub(super) room: Arc<AtomicU32>,
    pub(super) type_of_service: u8,
    pub(super) reuses: bool,
    pub(super) is_ipv6_only: bool,
    pub(super) ack_timeout: Option<u8>,
    /// The device was removed.
    pub(super) is_removed: bool,
}

impl Id {
    pub(super) fn new(handle: u32, uid: u64, queue: Arc<Queue>, (space, kind): (u16, u8)) -> Self {
        Self {
            handle,
            uid,
            queue,
            space,
            kind,
            state: State::Idle,
            source: None,
            destination: None,
            peer: None,
            place: None,
            is_child: false,
            claims: Vec::new(),
            reported: 0,
            room: Arc::default(),
            type_of_service: 0,
            reuses: false,
            is_ipv6_only: false,
            ack_timeout: None,
            is_removed: false,
        }
    }

    /// The port that it has for itself: its space, the port, the identifier.
    pub(super) fn port(&self) -> Option<(u16, u16, u32)> {
        let source = self.source.filter(|_| !self.is_child)?;
        Some((self.space, source.port(), self.handle))
    }

    pub(super) fn is_datagram(&self) -> bool {
        self.kind == 4
    }

    /// The path to its peer, from its device.
    pub(super) fn path(&self) -> Result<(Place, Path), c_int> {
        let place = self.place.clone().ok_or(libc::EINVAL)?;
        let path = Path { from: place.address, to: self.peer.ok_or(libc::EINVAL)? };
        Ok((place, path))
    }

    pub(super) fn service(&self, port: u16) -> u64 {
        u64::from(self.space) << 16 | u64::from(port)
    }

    /// The header at the beginning of its request's private data.
    pub(super) fn ip_header(&self) -> Result<IpHeader, c_int> {
        let (source, destination) =
            (self.source.ok_or(libc::EINVAL)?, self.destination.ok_or(libc::EINVAL)?);
        Ok(IpHeader { port: source.port(), source: source.ip(), destination: destination.ip() })
    }

    pub(super) fn ack_timeout(&self) -> u8 {
        self.ack_timeout.unwrap_or(LIFETIME + 1)
    }

    fn has_path(&self) -> bool {
        let before =
            matches!(self.state, State::Idle | State::Bound | State::Resolved | State::Listening);
        self.place.is_some() && self.peer.is_some() && !before
    }

    fn gids(&self) -> [[u8; 16]; 2] {
        let own = self.place.as_ref().map(|place| place.address);
        [own, self.peer].map(|address| address.map_or([0; 16], gid))
    }

    /// `struct ib_uverbs_ah_attr` for an address.
    pub(super) fn vector(&self, to: IpAddr) -> [u8; 32] {
        let mut vector = [0; 32];
        vector[..16].copy_from_slice(&gid(to));
        let (port, index) = self.place.as_ref().map_or((1, 0), |place| (place.port, place.index));
        vector[20..23].copy_from_slice(&[index, HOPS, self.type_of_service]);
        vector[29..31].copy_from_slice(&[1, port]);
        vector
    }

    /// `struct ib_uverbs_qp_attr` for the next state of the queue pair, with what the connection knows; the second is
    /// whether it knows the peer.
    pub(super) fn attributes(
        &self,
        state: u32,
        connection: Option<(Attributes, bool)>,
    ) -> Result<Answer, c_int> {
        let place = self.place.as_ref().ok_or(libc::EINVAL)?;
        let mut answer = Answer::new(144);
        // STATE
        let mut mask: u32 = 1;
        answer.put32(4, state);
        let is_connected = matches!(self.state, State::Connected(_));
        let peer = connection.filter(|(_, knows_peer)| *knows_peer).map(|(known, _)| known);
        match state {
            1 => {
                if is_connected && connection.is_none() && !self.is_datagram() {
                    return Err(libc::EINVAL);
                }
                mask |= 1 << 4 | 1 << 5; // PKEY_INDEX, PORT
                answer.put(133, &[place.port]);
                if self.is_datagram() {
                    mask |= 1 << 6; // QKEY
                    answer.put32(20, UDP_QKEY);
                } else {
                    mask |= 1 << 3; // ACCESS_FLAGS
                    let access = match connection {
                        None => 0,
                        Some((known, _)) if known.resources == 0 => 2,
                        Some(_) => 2 | 4 | 8,
                    };
                    answer.put32(36, access);
                }
            }
            2 => {
                let known = peer.ok_or(libc::EINVAL)?;
                mask |= 1 << 7 | 1 << 8 | 1 << 20 | 1 << 12; // AV, PATH_MTU, DEST_QPN, RQ_PSN
                answer.put32(12, known.mtu.into());
                answer.put32(24, known.psn);
                answer.put32(32, known.remote_qpn);
                answer.put(40, &self.vector(known.path.to));
                if matches!(known.transport, Transport::Rc | Transport::XrcReceive) {
                    mask |= 1 << 17 | 1 << 15; // MAX_DEST_RD_ATOMIC, MIN_RNR_TIMER
                    answer.put(131, &[known.resources]);
                }
            }
            3 => {
                let known = peer.ok_or(libc::EINVAL)?;
                mask |= 1 << 16; // SQ_PSN
                answer.put32(28, known.remote_psn);
                if matches!(known.transport, Transport::Rc | Transport::XrcSend) {
                    mask |= 1 << 10 | 1 << 11 | 1 << 13; // RETRY_CNT, RNR_RETRY, MAX_QP_RD_ATOMIC
                    answer.put(130, &[known.depth]);
                    answer.put(135, &[known.retry, known.rnr_retry]);
                }
                if known.transport.is_reliable() {
                    mask |= 1 << 9; // TIMEOUT
                    answer.put(134, &[self.ack_timeout.unwrap_or(known.ack_timeout)]);
                }
            }
            _ => return Err(libc::EINVAL),
        }
        answer.put32(0, mask);
        Ok(answer)
    }

    /// `struct rdma_ucm_query_route_resp`
    pub(super) fn route(&self) -> Answer {
        let mut answer = Answer::new(208);
        answer.put_address(136, self.source);
        answer.put_address(164, self.destination);
        answer.put32(200, u32::MAX);
        let Some(place) = &self.place else { return answer };
        answer.put(0, &place.guid.to_be_bytes());
        answer.put(196, &[place.port]);
        let [from, to] = self.gids();
        // struct ib_user_path_rec
        answer.put(8, &to);
        answer.put(24, &from);
        answer.put(60, &PKEY.to_be_bytes());
        if self.has_path() {
            answer.put32(52, 1);
            answer.put32(56, place.mtu.into());
            answer.put(62, &[HOPS, self.type_of_service, 1, 0, 2, 2, 0, 2, LIFETIME]);
            answer.put32(192, 1);
        }
        answer
    }

    /// `struct rdma_ucm_query_addr_resp`, with addresses of the IP, or of `AF_IB`.
    pub(super) fn addresses(&self, of_gids: bool) -> Answer {
        let mut answer = Answer::new(280);
        answer.put32(272, u32::MAX);
        if let Some(place) = &self.place {
            answer.put(0, &place.guid.to_be_bytes());
            answer.put(8, &[place.port]);
            answer.put(10, &PKEY.to_be_bytes());
        }
        let mut lengths = [0; 2];
        let of = [(16, self.source), (144, self.destination)];
        for ((length, (at, address)), gid) in lengths.iter_mut().zip(of).zip(self.gids()) {
            if of_gids {
                // struct sockaddr_ib
                answer.put(at, &27_u16.to_ne_bytes());
                answer.put(at + 2, &PKEY.to_be_bytes());
                answer.put(at + 8, &gid);
                let service = self.service(address.map_or(0, |address| address.port()));
                answer.put(at + 24, &service.to_be_bytes());
                *length = 48;
            } else {
                *length = answer.put_address(at, address);
            }
        }
        answer.put(12, &lengths[0].to_ne_bytes());
        answer.put(14, &lengths[1].to_ne_bytes());
        answer
    }

    /// `struct rdma_ucm_query_path_resp`
    pub(super) fn paths(&self) -> Answer {
        let mut answer = Answer::new(80);
        let Some(place) = self.place.as_ref().filter(|_| self.has_path()) else { return answer };
        answer.put32(0, 1);
        // GMP, PRIMARY, BIDIRECTIONAL
        answer.put32(8, 43);
        let [from, to] = self.gids();
        // struct ibv_path_record
        answer.put(24, &to);
        answer.put(40, &from);
        answer.put(60, &u32::from(HOPS).to_be_bytes());
        answer.put(64, &[self.type_of_service, 0x80]);
        answer.put(66, &PKEY.to_be_bytes());
        answer.put(70, &[0x80 | place.mtu, 0x80, 0x80 | LIFETIME]);
        answer
    }
}

/// The kind of queue pair of a port space; that of `PS_IB` the program chooses.
pub(super) fn kind_of(space: u16, chosen: u8) -> Option<u8> {
    use super::abi::{PS_IB, PS_IPOIB, PS_TCP, transport};
    match space {
        PS_TCP => Some(2),
        PS_UDP | PS_IPOIB => Some(4),
        PS_IB => transport(chosen).map(|_| chosen),
        _ => None,
    }
}
