//! How two sides find each other and connect.

#[cfg(any(feature = "channel", feature = "rdmacm"))]
mod handshake;
#[cfg(feature = "rdmacm")]
pub(crate) mod rdmacm;
#[cfg(feature = "channel")]
pub(crate) mod tcp;

#[cfg(feature = "async")]
pub(crate) use handshake::Handshake;
