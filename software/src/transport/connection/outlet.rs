//! Outlets, which are told of events of connections.

use std::sync::Arc;

use crate::transport::work::Path;
use crate::wire::management::{Reply, Request, ServiceReply, ServiceRequest};

/// An event for the program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// A peer asks for a connection, at a listener.
    Request(Box<Arrived<Request>>),
    /// A peer asks for a queue pair of datagrams, at a listener.
    ServiceRequest(Box<Arrived<ServiceRequest>>),
    /// The peer has accepted. The program is to say that it is ready.
    Reply(Box<Reply>, u32),
    /// The peer has accepted.
    ServiceReply(Box<ServiceReply>),
    Established,
    Rejected(u16, Box<[u8; 148]>),
    /// No answer came.
    Unreachable,
    /// The peer has disconnected, or answered; false if no answer came.
    Disconnected(bool),
    /// The queue pair's packets are gone.
    TimewaitExit,
}

/// A request that has arrived, for which there is a connection now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Arrived<T> {
    pub(crate) connection: u32,
    pub(crate) path: Path,
    pub(crate) modifier: u32,
    pub(crate) message: T,
}

/// Where events go.
pub(crate) trait Outlet: std::fmt::Debug + Send + Sync {
    fn tell(&self, id: u32, event: Event);
}

/// The receiver of a connection's events.
#[derive(Clone, Debug)]
pub(crate) struct Owner {
    pub(crate) id: u32,
    pub(crate) outlet: Arc<dyn Outlet>,
}
