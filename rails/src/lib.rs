//! Several RDMA devices as one: pairing, striping and failover.
//!
//! A server with eight network cards has eight RDMA devices, and a queue pair uses one of them. [`Rails`] uses all:
//!
//! - It takes devices by name, by NUMA node, or near a GPU, and **pairs** them with the peer's: the two sides tell each
//!   other their addresses, and the same pairs are formed on both.
//! - [`RailMemory`] is one allocation with a key per device, registered on all of them in parallel.
//! - A [`Transfer`] writes or reads any number of bytes. It is cut into pieces, and each piece goes to the pair that will
//!   carry it first, as measured: a slow or shared rail gets less.
//! - [Messages](Rails::send) arrive whole, once and in their order.
//! - The peer learns that a [notified](Transfer::notify) write is complete, once, whatever the rails and their order.
//! - **A rail that fails** costs no transfer and no message: they go over the others, and it comes back by itself. When the last
//!   one is gone, the error says why each went.
//!
//! ```no_run
//! use std::net::TcpListener;
//! use std::time::{Duration, Instant};
//!
//! use ibverbs::AccessFlags;
//! use ibverbs_rails::{Event, Rails};
//!
//! // The receiving side. The sending side has `connect`, `Transfer::write` and `wait`.
//! let mut rails = Rails::builder().build()?;
//! let memory = rails.allocate(1 << 30, AccessFlags::REMOTE_WRITE)?;
//! let listener = TcpListener::bind("[::]:18515")?;
//! let deadline = Instant::now() + Duration::from_secs(60);
//! let sender = rails.accept(&listener, deadline)?;
//! # fn to_bytes(_: ibverbs_rails::RemoteRailMemory) -> Vec<u8> { Vec::new() }
//! rails.send(sender, to_bytes(memory.remote()))?; // by serde, in a format of the program's
//! while !matches!(rails.wait_event(deadline)?, Event::Notified { tag: 1, .. }) {}
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Threads
//!
//! A `Rails` has one owner, and works when that calls it: the calls that wait, or [`Rails::turn`]. A peer that does not
//! call gets no messages, and is asked again without end; its rails do not count as failed. In an asynchronous program,
//! tasks have [`AsyncRails`], and one of them runs the [`RailsDriver`].
//!
//! # Two sides
//!
//! Both need the same version of this crate. One TCP connection per peer carries what they agree upon; when it breaks,
//! the peer is gone.

mod agreeing;
mod closing;
mod connecting;
mod control;
mod devices;
mod driver;
mod ended;
mod error;
mod event;
mod memory;
mod messages;
mod notify;
mod opening;
mod pair;
mod pairing;
mod peer;
mod posting;
mod rails;
mod readiness;
mod transfer;

pub use control::ControlStream;
pub use devices::RailsBuilder;
pub use driver::{AsyncRails, RailsDriver};
pub use error::{RailsError, Result};
pub use event::{Event, PeerId, TransferId};
pub use memory::{RailMemory, RailSlice, RemoteRailMemory};
pub use rails::Rails;
pub use transfer::Transfer;
