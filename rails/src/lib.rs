//! Several RDMA devices as one: pairing, striping and failover.
//!
//! A server with eight network cards has eight RDMA devices, and a queue pair uses one of them. [`Rails`] uses all. With one
//! device it works as well, and the program need not change when there are more:
//!
//! - It takes devices by name, by NUMA node, or near a GPU, and **pairs** them with the peer's: the two sides tell each
//!   other their addresses, and the same pairs are formed on both.
//! - [`RailMemory`] is one allocation with a key per device, registered on all of them in parallel.
//! - A [`Transfer`] writes or reads any number of bytes. It is cut into pieces, and each piece goes to the pair that will
//!   carry it first, as measured: a slow or shared rail gets less.
//! - [Messages](Rails::send) arrive whole, once and in their order. What the sender was told has arrived, the peer's program
//!   gets, even if the sender closes then.
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
//! rails.send(sender, memory.remote().to_bytes())?; // or by serde, in a format of the program's
//! while !matches!(rails.wait_event(deadline)?, Event::Notified { tag: 1, .. }) {}
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Threads
//!
//! A `Rails` has one owner, and works when that calls it: the calls that wait, or [`Rails::turn`]. While the program of a peer
//! does not call, our messages and notified writes wait for it without end; its rails do not count as failed. In an
//! asynchronous program, tasks have [`AsyncRails`], and one of them runs the [`RailsDriver`].
//!
//! # Two sides
//!
//! Both need the same version of this crate. One TCP connection per peer carries what they agree upon; when it breaks, or
//! the peer's machine has not answered over it for a minute, the peer is gone.
//!
//! # What a peer can do
//!
//! A peer that breaks the protocol is dropped: one that sends more messages than there is room for, names devices that do
//! not exist, or sends a frame in the wrong state. So is one that connects to this side and says nothing for 10 s, or has not tried all pairs after a
//! minute. When 128 KiB wait for a peer that does not read what it is told, it is not listened to; it is dropped when it reads nothing
//! for 10 s, or 512 KiB wait. What a peer makes this side keep is bounded by the settings, also while the program takes no events:
//! 32 messages, 48 notifications, and the last two changes of each rail. No peer keeps [`Rails::turn`] from returning.
//!
//! But RDMA trusts a peer that is connected. All memory of a `Rails` is in one protection domain for each device, so **a peer may use
//! any key of that domain**: it reads and writes whatever was allocated with `REMOTE_READ` or `REMOTE_WRITE`, for itself or for
//! another peer, if it knows the address and guesses the key of 32 bits. Give peers that do not trust each other a `Rails` each.
//! Nothing is encrypted, and no peer has to prove who it is.

#![forbid(unsafe_code)]
#![warn(clippy::print_stderr, clippy::print_stdout)]

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
mod negotiate;
mod opening;
mod pair;
mod pairing;
mod panics;
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
pub use ibverbs_transfer::PciAddress;
pub use memory::{RailMemory, RailSlice, RemoteRailMemory};
pub use rails::Rails;
pub use transfer::Transfer;
