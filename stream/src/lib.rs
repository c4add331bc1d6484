#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod chunk;
mod config;
mod conn;
mod connect;
mod error;
#[cfg(test)]
mod every_order;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod harness;
mod hub;
#[cfg(feature = "hyper-util")]
pub mod hyper;
mod joining;
#[cfg(feature = "rdmacm")]
mod manager;
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
pub use error::StreamError;
pub use hub::Hub;
pub use joining::Role;
pub use stats::Stats;
pub use stream::{ReadHalf, Stream, WriteHalf};
