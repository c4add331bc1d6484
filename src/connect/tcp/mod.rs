//! Connecting over TCP, or over any other stream.
//!
//! ```no_run
//! # // needs a peer
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let context = ibverbs::open_first()?;
//! # let domain = context.alloc_pd()?;
//! let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
//! // The peer calls `accept` with its listener.
//! let (channel, greeting) = domain.create_channel().build()?.connect("server:18515", b"my name", deadline)?;
//! # Ok(())
//! # }
//! ```
//!
//! | to | |
//! |---|---|
//! | connect or accept | methods of [`PreparedChannel`](crate::PreparedChannel) and [`PreparedQueuePair`](crate::PreparedQueuePair) |
//! | use a stream of your own | [`DeadlineStream`], [`AsyncStream`] |
//! | go in steps, or feed it bytes | [`Exchange`], [`Step`] |
//! | know why it failed | [`ExchangeError`], [`ExchangeStage`] |
//! | notice that the peer's program has ended | [`peer_has_closed`], [`wait_until_peer_closes`] |
//!
//! Both sides exchange their endpoints and private data, shake hands, and exchange the results. Both return when both
//! are ready, or when one has failed.
//!
//! ```text
//! the side that connects             the side that accepts
//! greeting ------------------------>            "ibverbs", version, endpoint, private data
//!          <------------------------ greeting
//! handshake                          handshake
//! verdict  ------------------------>            ready, or the errno value
//!          <------------------------ verdict
//! ```
//!
//! - `wire`: the messages as bytes, and the checks of received bytes.
//! - `exchange`: the exchange, as a state machine.
//! - `stream`: the exchange over streams whose waits have a deadline.
//! - `async_stream`: the exchange over streams whose reads and writes are polled.
//! - `addresses`: TCP: `connect` and `accept`, and monitoring the peer through the stream.
//!
//! The first 12 bytes of a greeting contain its version, and have the same form in all versions. A side of another
//! version reads the greeting to its end and sends its own, so both sides can report both versions.

mod addresses;
#[cfg(feature = "async")]
mod async_stream;
mod error;
mod exchange;
mod stream;
mod wire;

pub use crate::connect::handshake::Step;
pub(crate) use addresses::connect_over_methods;
pub use addresses::{peer_has_closed, wait_until_peer_closes};
#[cfg(feature = "async")]
pub use async_stream::AsyncStream;
#[cfg(feature = "async")]
pub(crate) use async_stream::exchange_over;
pub use error::{ExchangeError, ExchangeStage, MAX_PRIVATE_DATA};
pub use exchange::Exchange;
pub(crate) use exchange::{Attempt, Role};
pub use stream::DeadlineStream;
pub(crate) use stream::exchange;
#[cfg(any(test, fuzzing))]
pub use wire::exchanged_bytes;
