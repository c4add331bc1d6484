//! Work requests in the queues, and completions.

use std::net::IpAddr;

use crate::ffi::{ibv_wc_flags, ibv_wc_opcode, ibv_wc_status};
use crate::wire::header::{Feth, FlowEth, Reth};

/// `struct ibv_sge`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sge {
    pub(crate) address: u64,
    pub(crate) length: u32,
    pub(crate) lkey: u32,
}

/// The destination of packets, and the local address that they are sent from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Path {
    pub(crate) from: IpAddr,
    pub(crate) to: IpAddr,
}

/// Whether packets go from one address to the other: both are of one family, or the other is a group of IPv6, which devices
/// with addresses of IPv4 can be in too.
pub(super) fn is_way(from: IpAddr, to: IpAddr) -> bool {
    from.is_ipv4() == to.is_ipv4() || to.is_ipv6() && to.is_multicast()
}

/// The destination of a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Destination {
    pub(crate) path: Path,
    /// The protection domain of the address handle.
    pub(crate) pd: u32,
    pub(crate) qpn: u32,
    /// The Q_Key, or the access key of DC.
    pub(crate) key: u64,
}

/// A Q_Key with the highest bit set means the Q_Key of the sending queue pair.
pub(super) fn own_key(named: u32, own: u32) -> u32 {
    if named & 1 << 31 != 0 { own } else { named }
}

/// What makes a queue pair a flow: see [`flows`](super::flows).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Flow {
    /// The number of the program's queue pair.
    pub(crate) of: u32,
    /// What is in front of each request.
    pub(crate) header: FlowEth,
    /// It sends requests; else it answers them.
    pub(crate) sends: bool,
    /// The number of the sender's address handle here.
    pub(crate) address_handle: u16,
}

/// A flow that a queue pair sends its requests by.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OutboundFlow {
    pub(crate) number: u32,
    pub(crate) to: Destination,
    pub(crate) in_flight: u32,
}

/// A flow of a peer that has sent requests.
#[derive(Clone, Copy, Debug)]
pub(crate) struct InboundFlow {
    pub(crate) began: u64,
    /// `None`: it has ended.
    pub(crate) number: Option<u32>,
}

/// What is left to do for flows once the call of a queue pair is over.
#[derive(Debug)]
pub(crate) enum FlowStep {
    /// The queue pair may have requests for its flows.
    Send(u32),
    /// A request of the DC initiator has failed.
    Fail(u32),
    /// A request of a flow has ended.
    Done { flow: u32, of: u32, posted: Box<Posted>, status: ibv_wc_status },
}

/// `struct ibv_mw_bind_info`, and the window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Bind {
    /// The window's number in the table of keys.
    pub(crate) window: u32,
    /// Its new key.
    pub(crate) rkey: u32,
    pub(crate) region: u32,
    pub(crate) address: u64,
    pub(crate) length: u64,
    pub(crate) access: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operation {
    Send,
    Write { address: u64, rkey: u32 },
    Read { address: u64, rkey: u32 },
    FetchAdd { address: u64, rkey: u32, add: u64 },
    CompareSwap { address: u64, rkey: u32, compare: u64, swap: u64 },
    AtomicWrite { address: u64, rkey: u32 },
    Flush { feth: Feth, reth: Reth },
    Bind(Bind),
    Invalidate { rkey: u32 },
}

impl Operation {
    /// Whether the peer answers by a packet of its own, and no later acknowledgement counts.
    pub(crate) fn is_fetching(&self) -> bool {
        self.returns_data() || self.is_remote_only()
    }

    /// Whether what the peer answers goes to the request's memory.
    pub(crate) fn returns_data(&self) -> bool {
        matches!(self, Self::Read { .. } | Self::FetchAdd { .. } | Self::CompareSwap { .. })
    }

    /// Whether the peer's answer is an empty one of a READ.
    pub(crate) fn is_remote_only(&self) -> bool {
        matches!(self, Self::AtomicWrite { .. } | Self::Flush { .. })
    }

    /// Whether it sends no packet.
    pub(crate) fn is_local(&self) -> bool {
        matches!(self, Self::Bind(_) | Self::Invalidate { .. })
    }

    pub(crate) fn completion(&self) -> ibv_wc_opcode {
        match self {
            Self::Send => ibv_wc_opcode::IBV_WC_SEND,
            Self::Write { .. } => ibv_wc_opcode::IBV_WC_RDMA_WRITE,
            Self::Read { .. } => ibv_wc_opcode::IBV_WC_RDMA_READ,
            Self::FetchAdd { .. } => ibv_wc_opcode::IBV_WC_FETCH_ADD,
            Self::CompareSwap { .. } => ibv_wc_opcode::IBV_WC_COMP_SWAP,
            Self::AtomicWrite { .. } => ibv_wc_opcode::IBV_WC_ATOMIC_WRITE,
            Self::Flush { .. } => ibv_wc_opcode::IBV_WC_FLUSH,
            Self::Bind(_) => ibv_wc_opcode::IBV_WC_BIND_MW,
            Self::Invalidate { .. } => ibv_wc_opcode::IBV_WC_LOCAL_INV,
        }
    }
}

/// The value that a SEND or a WRITE carries in addition to its data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Extra {
    None,
    /// In network byte order.
    Immediate(u32),
    /// The key that the receiver invalidates.
    Invalidate(u32),
}

/// The data of a request.
#[derive(Clone, Debug)]
pub(crate) enum Data {
    List(Vec<Sge>),
    Inline(Vec<u8>),
}

/// A request of a send queue.
#[derive(Clone, Debug)]
pub(crate) struct SendRequest {
    pub(crate) id: u64,
    pub(crate) operation: Operation,
    pub(crate) extra: Extra,
    pub(crate) data: Data,
    pub(crate) length: u32,
    pub(crate) signaled: bool,
    pub(crate) solicited: bool,
    pub(crate) fence: bool,
    pub(crate) destination: Option<Destination>,
    /// The number of the peer's shared receive queue, for extended reliable connections.
    pub(crate) remote_srq: Option<u32>,
}

/// A request that was posted, and its progress.
#[derive(Debug)]
pub(crate) struct Posted {
    pub(crate) request: SendRequest,
    /// The number of its first packet, and how many it has.
    pub(crate) first: u64,
    pub(crate) packets: u32,
    /// The number of packets of a READ's answer that have arrived.
    pub(crate) received: u32,
    /// A local operation was carried out, or a fetched value has arrived.
    pub(crate) done: bool,
    /// The request failed before it was sent; the error is reported after the earlier requests have completed.
    pub(crate) failed: Option<ibv_wc_status>,
    /// The checksum of its data when it was posted, if strict.
    pub(crate) seal: Option<u32>,
}

/// A request of a receive queue.
#[derive(Clone, Debug)]
pub(crate) struct Receive {
    pub(crate) id: u64,
    pub(crate) list: Vec<Sge>,
}

impl Posted {
    /// The number of the packet after its last.
    pub(crate) fn end(&self) -> u64 {
        self.first + u64::from(self.packets)
    }
}

impl Receive {
    pub(crate) fn length(&self) -> u64 {
        self.list.iter().map(|sge| u64::from(sge.length)).sum()
    }
}

/// The number of places, and their queue, that polling a completion releases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Release {
    None,
    Send(u32),
    Receive,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Completion {
    pub(crate) id: u64,
    pub(crate) status: ibv_wc_status,
    pub(crate) opcode: ibv_wc_opcode,
    pub(crate) length: u32,
    /// Immediate data in network byte order, or the key that was invalidated.
    pub(crate) immediate: u32,
    pub(crate) flags: u32,
    pub(crate) qpn: u32,
    pub(crate) source: u32,
    /// The number of the sender's address handle, for SRD.
    pub(crate) address_handle: u16,
    /// The kind of a datagram's header, where InfiniBand has a service level: 1 for IPv6, 2 for IPv4.
    pub(crate) service_level: u8,
    pub(crate) solicited: bool,
    pub(crate) release: Release,
    /// Both in nanoseconds: of the device's clock, and since 1970.
    pub(crate) time: u64,
    pub(crate) wall_clock: u64,
}

impl Completion {
    pub(crate) fn new(id: u64, qpn: u32, status: ibv_wc_status, opcode: ibv_wc_opcode) -> Self {
        Self {
            id,
            status,
            opcode,
            length: 0,
            immediate: 0,
            flags: 0,
            qpn,
            source: 0,
            address_handle: 0,
            service_level: 0,
            solicited: false,
            release: Release::None,
            time: 0,
            wall_clock: 0,
        }
    }

    pub(crate) fn extra(&mut self, extra: Extra) {
        match extra {
            Extra::None => {}
            Extra::Immediate(data) => {
                self.immediate = data;
                self.flags |= ibv_wc_flags::IBV_WC_WITH_IMM.0;
            }
            Extra::Invalidate(rkey) => {
                self.immediate = rkey;
                self.flags |= ibv_wc_flags::IBV_WC_WITH_INV.0;
            }
        }
    }
}
