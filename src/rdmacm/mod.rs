//! Connecting by IP address, through the kernel's connection manager (librdmacm).
//!
//! [`Listener`] and [`Route`] have programs.
//!
//! | to | |
//! |---|---|
//! | accept | [`Listener`], [`ConnectionRequest`] |
//! | connect | [`Route`], [`RouteBuilder`]; without waiting [`RouteResolution`] |
//! | hold a connection and hear of its end | [`Connection`], [`ConnectionControl`], [`ConnectionEvent`] |
//! | post receives first, or go step by step | [`PendingConnection`], [`PendingAccept`], [`Separate`], [`Connecting`], [`Step`] |
//! | send datagrams, join groups | [`DatagramListener`], [`DatagramRoute`], [`MulticastMembership`] |
//! | know why it failed | [`ConnectionError`], [`RejectReason`], [`Rejection`] |
//!
//! This module separates three things that `rdma_cm_id` mixes:
//!
//!  - **Objects** (queue pairs, completion queues, regions) are on the program's own context. librdmacm
//!    opens each device a second time (`id->verbs`); nothing here uses that context. An
//!    identifier never gets a queue pair (`id->qp`): its number goes to the peer with the request, the
//!    attributes for its states come from `rdma_init_qp_attr`, and the side that connects ends the
//!    handshake with `rdma_establish`.
//!  - **Identifiers**: each owns the channel of its events. A request arrives on the listener's channel,
//!    and is moved to a channel of its own before the program gets it.
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
mod id;
mod listener;
#[cfg(feature = "tokio")]
mod on_tokio;
mod private_data;
mod reach;
mod route;

pub use crate::handshake::Step;

pub use connectable::Connectable;
#[cfg(feature = "async")]
pub(crate) use connectable::sealed;
pub use connecting::{Connecting, PendingAccept, PendingConnection, Separate};
pub use connection::{Connection, ConnectionControl};
pub use datagram::{
    DatagramAddress, DatagramListener, DatagramRequest, DatagramRoute, MulticastMembership,
};
pub use error::{ConnectionError, RejectReason, Rejection};
pub use event::{ConnectionEvent, ConnectionEventKind};
pub use listener::{ConnectionRequest, Listener, ListenerBuilder};
pub use private_data::PrivateData;
#[cfg(any(test, fuzzing))]
pub use private_data::private_data;
pub use route::{Route, RouteBuilder, RouteResolution};

/// The verb that the error of an expired wait names.
const WAIT: &str = "rdma_get_cm_event";
