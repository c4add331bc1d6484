//! Connecting over TCP, or over any other stream.
//!
//! Both sides exchange their endpoints and private data, shake hands, and exchange the results of their
//! handshakes. Both return when both are ready, or when one has failed.
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
//! - `stream`: streams whose waits have a deadline.
//! - `async_stream`: streams whose reads and writes are polled.
//! - `exchange`: the exchange above, a state machine that is fed with bytes, and over any such stream.
//! - `addresses`: TCP itself: `connect` and `accept`, and monitoring the peer through the stream.
//!
//! The first 12 bytes of a greeting contain its version, and have the same form in all versions: a side
//! with another version reads the greeting to its end and sends its own, so both sides can report both
//! versions.

mod addresses;
#[cfg(feature = "async")]
mod async_stream;
mod error;
mod exchange;
mod stream;
mod wire;

pub use crate::handshake::Step;
pub use addresses::{peer_has_closed, wait_until_peer_closes};
#[cfg(feature = "async")]
pub use async_stream::AsyncStream;
#[cfg(feature = "async")]
pub(crate) use async_stream::Polled;
pub use error::{ExchangeError, ExchangeStage, MAX_PRIVATE_DATA};
pub use exchange::Exchange;
#[cfg(feature = "async")]
pub(crate) use exchange::{Role, exchange_over};
pub use stream::{DeadlineStream, StreamWithDeadline};
#[cfg(any(test, fuzzing))]
pub use wire::exchanged_bytes;
