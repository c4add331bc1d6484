//! Connecting by IP address, through the kernel's connection manager (librdmacm).
//!
//! [`Listener`] and [`Route`] have examples.
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
//!  - **Objects** (queue pairs, completion queues, regions) are on the program's own context, not on the one
//!    that librdmacm opens (`id->verbs`). An identifier has no queue pair (`id->qp`): the request carries its
//!    number, `rdma_init_qp_attr` gives the attributes for its states, and the side that connects ends the
//!    handshake with `rdma_establish`.
//!  - **Identifiers** each own the channel of their events. A request moves from the listener's channel to
//!    its own before the program gets it.
//!  - **Events** are copied and acknowledged by the call that reads them, which takes `&mut`. Destroying an
//!    identifier waits for unacknowledged events, and must not race a read.
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
//! On iWARP the kernel itself moves the queue pair from INIT to RTS, and both sides get ESTABLISHED.

mod connectable;
mod connecting;
mod connection;
mod datagram;
mod diagnose;
mod error;
#[cfg(feature = "channel")]
mod established;
mod event;
mod id;
mod listener;
#[cfg(feature = "tokio")]
mod on_tokio;
mod private_data;
mod route;
#[cfg(not(feature = "tokio"))]
mod without_tokio;

pub use crate::connect::handshake::Step;

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

/// Marks an expired wait.
const WAIT: &str = "rdma_get_cm_event";
