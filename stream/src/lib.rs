#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]
#![warn(clippy::print_stderr, clippy::print_stdout)]
#![cfg_attr(docsrs, feature(doc_cfg))]

#[cfg(test)]
mod accept_order;
#[cfg(feature = "axum")]
pub mod axum;
mod buffers;
mod chunk;
mod config;
mod conn;
mod connect;
mod drivers;
mod error;
#[cfg(test)]
mod every_order;
#[cfg(all(test, feature = "tokio"))]
mod every_waiter;
mod features;
mod handshake;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod harness;
mod helper;
mod hub;
#[cfg(feature = "hyper-util")]
pub mod hyper;
#[cfg(any(feature = "axum", feature = "tonic"))]
mod info;
mod interrupt;
mod linger;
#[cfg(feature = "rdmacm")]
mod manager;
#[cfg(all(test, feature = "tokio"))]
mod own_streams;
mod owned;
mod state;
mod stats;
mod stream;
#[cfg(feature = "tokio")]
pub mod tokio;
#[cfg(feature = "tonic")]
pub mod tonic;
mod watch;
mod wire;

pub use config::HubBuilder;
pub use connect::{Incoming, Listener};
pub use error::{Refusal, StreamError};
pub use handshake::Role;
pub use hub::Hub;
pub use owned::{NotWritten, ReceivedBuffer, SendBuffer};
pub use stats::Stats;
pub use stream::{ReadHalf, Stream, WriteHalf};
