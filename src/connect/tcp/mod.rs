//! Connecting over TCP, or over any other stream.
//!
//! Both sides tell each other their endpoints and some bytes of the program's own, shake hands, and tell
//! each other how that went. Both return when both are ready, or when one is not.
//!
//! ```text
//! who connects                     who accepts
//! greeting ------------------------>            "ibverbs", version, endpoint, private data
//!          <------------------------ greeting
//! handshake                          handshake
//! verdict  ------------------------>            ready, or the errno value
//!          <------------------------ verdict
//! ```
//!
//! - `wire`: what the messages look like in bytes, and which bytes are refused.
//! - `stream`: streams that wait no longer than until a deadline.
//! - `exchange`: the order above, over any such stream.
//! - `addresses`: TCP itself: `connect` and `accept`, and monitoring the peer through the stream.
//!
//! The greeting begins with its version, and its first 12 bytes are the same in all versions: a side
//! that speaks another version reads the greeting to its end and sends its own, so both can say which
//! versions have met.

mod addresses;
mod error;
mod exchange;
mod stream;
mod wire;

pub use addresses::{peer_has_closed, wait_until_peer_closes};
pub use error::ExchangeError;
pub use stream::{DeadlineStream, StreamWithDeadline};
pub use wire::MAX_PRIVATE_DATA;
