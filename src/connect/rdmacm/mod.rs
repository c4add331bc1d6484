//! Connecting by IP address, through the kernel's connection manager (librdmacm).
//!
//! Three things are kept apart here that `rdma_cm_id` mixes:
//!
//!  - **Objects** (queue pairs, completion queues, regions) are on the program's own context. librdmacm
//!    opens each device a second time (`id->verbs`); that context is used by nothing here. An
//!    identifier never gets a queue pair (`id->qp`): its number goes to the peer with the request, the
//!    attributes for its states come from `rdma_init_qp_attr`, and the side that connects ends the
//!    handshake with `rdma_establish`.
//!  - **Identifiers**: each owns the channel that its events come by. A request arrives on the listener's
//!    channel, and is moved to one of its own before anybody sees it.
//!  - **Events** are copied and acknowledged by the call that reads them, which takes `&mut`: destroying
//!    an identifier waits for events that are not acknowledged, and must not race a read.
//!
//! On InfiniBand and RoCE:
//!
//! ```text
//!   connects                                             accepts
//!   INIT, rdma_connect ──────── REQ, private data ─────► CONNECT_REQUEST
//!   CONNECT_RESPONSE ◄───────── REP, private data ────── INIT, RTR, RTS, rdma_accept
//!   RTR, RTS, rdma_establish ── RTU ───────────────────► ESTABLISHED
//! ```
//!
//! On iWARP the kernel moves the queue pair from INIT to RTS itself, and both sides get ESTABLISHED.

mod address;
mod connectable;
mod connecting;
mod connection;
mod datagram;
mod error;
mod event;
mod event_channel;
mod id;
mod listener;
mod multicast;
mod private_data;
mod request;
mod route;

pub use connectable::Connectable;
pub use connecting::{Connecting, PendingAccept, PendingConnection};
pub use connection::{Connection, ConnectionControl};
pub use datagram::{DatagramListener, DatagramPeer, DatagramRequest, DatagramRoute};
pub use error::{ConnectionError, RejectReason, Rejection};
pub use event::{ConnectionEvent, ConnectionEventKind};
pub use listener::{Listener, ListenerBuilder};
pub use multicast::MulticastMembership;
pub use private_data::PrivateData;
pub use request::ConnectionRequest;
pub use route::{Route, RouteBuilder, RouteResolution};

/// The "verb" of a wait whose time is over.
const WAIT: &str = "rdma_get_cm_event";

/// How far something is that is done in steps.
#[derive(Debug)]
#[must_use]
pub enum Step<D, P> {
    /// It is done, and this came of it.
    Done(D),
    /// It waits for the kernel: go on with this when its file is readable.
    Pending(P),
}
