//! A key-value store over RDMA, on tokio. It has no line of `unsafe`.
//!
//! Requests and answers are messages. A value of up to 4 KiB is a part of its message. A larger one, of up to
//! 1 MiB, is read from the other side's memory: the server reads what a client puts, and a client reads what
//! it gets. Each client has a channel; all channels of the server share one reactor.
//!
//! - `protocol`: the messages
//! - `store`: the values
//! - `server`: clients that come and go, the admin socket, the timer, shutting down
//! - `session`: one client of the server
//! - `client`: the other side, which connects again after a failure

#![forbid(unsafe_code)]
#![allow(missing_docs, missing_debug_implementations)] // an example

pub mod client;
pub mod protocol;
pub mod server;
mod session;
mod store;

pub type Failure = Box<dyn std::error::Error + Send + Sync>;
pub type Result<T, E = Failure> = std::result::Result<T, E>;
