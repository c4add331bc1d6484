//! Connecting: over any stream, or by the connection manager.

#[cfg(any(feature = "channel", feature = "rdmacm"))]
pub(crate) mod handshake;
#[cfg(any(test, fuzzing))]
pub mod harness;
#[cfg(feature = "rdmacm")]
pub mod rdmacm;
#[cfg(feature = "channel")]
pub mod tcp;
