//! Channels: RDMA in safe Rust. A [`Channel`] is a connection to one peer; a [`Loop`](crate::Loop) has many of
//! them.
//!
//! ```
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let rxe0 = ibverbs_software::Device::builder().name("rxe0").build().unwrap();
//! # rxe0.register();
//! use ibverbs::{Inline, TransportError};
//!
//! let context = ibverbs::open_first()?;
//! let domain = context.alloc_pd()?;
//! let prepared = domain.create_channel().max_inline_data(16).build()?;
//! let peer = prepared.endpoint(); // here the peer's would come in
//! let mut channel = prepared.handshake(peer)?;
//! let mut region = domain.allocate::<u8>(16)?;
//! channel.scope(|scope| {
//!     let receive = scope.post_receive(&mut region)?;
//!     scope.post_send(Inline(b"hello"))?.wait()?;
//!     println!("{} bytes", receive.wait()?.1.byte_len());
//!     Ok::<_, TransportError>(())
//! })?;
//! # Ok(())
//! # }
//! ```
//!
//! | to | |
//! |---|---|
//! | build and connect a channel | [`ChannelBuilder`], [`PreparedChannel`]; [`tcp`](crate::tcp), `rdmacm` |
//! | post and wait, one thing after the other | [`Channel`], with a deadline [`ChannelUntil`] |
//! | post many, which borrow their buffers | [`Scope`], [`ScopedPendingWork`] |
//! | prepare an end for datagrams | [`DatagramsBuilder`], [`EndDestination`] |
//! | own the buffer of an operation, on a loop or as a future | [`OwnedBuffer`], [`AnyBuffer`] |
//! | serve many peers | [`event_loop`](crate::event_loop) |
//! | end waits from another thread | [`CancelHandle`] |
//! | do the same with several peers | [`ChannelSet`], [`SetScope`] |
//! | post by hand (`unsafe`) | [`PendingWork`] |
//! | understand an error | [`TransportError`], [`ScopeError`], [`OperationError`] |
//! | write a function for any request | [`WorkRequest`], [`IntoSend`], [`IntoReceive`] |

mod blocking;
mod builder;
#[allow(clippy::module_inception, reason = "one object per file")]
mod channel;
mod channel_set;
mod core;
mod credits;
mod datagrams;
mod directed;
mod dispatch;
mod error;
mod in_flight;
mod keep_alive;
mod link;
mod operation;
mod owned_buffer;
pub(crate) mod parts;
mod peer_sign;
mod pending_work;
mod posting;
mod prepared_channel;
mod scope;
mod scoped_work;
mod slot;
mod stop;
mod unpolled;
mod wait;

pub use blocking::ChannelUntil;
pub use builder::ChannelBuilder;
pub use channel::{Channel, ChannelClosed};
pub use channel_set::{ChannelSet, PeerResults, SetScope};
pub use datagrams::DatagramsBuilder;
pub use directed::EndDestination;
pub use error::{OperationError, OwnedResult, ScopeError, TransportError, TransportResult};
pub(crate) use owned_buffer::Piece;
pub use owned_buffer::{AnyBuffer, OwnedBuffer};
pub use pending_work::PendingWork;
pub use posting::{IntoReceive, IntoSend, WorkRequest};
pub use prepared_channel::PreparedChannel;
pub use scope::Scope;
pub use scoped_work::ScopedPendingWork;
pub use wait::CancelHandle;
