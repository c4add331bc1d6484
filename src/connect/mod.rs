//! How two sides find each other and connect.

#[cfg(any(feature = "channel", feature = "rdmacm"))]
mod prepared;
#[cfg(feature = "rdmacm")]
pub(crate) mod rdmacm;
#[cfg(feature = "channel")]
pub(crate) mod tcp;

#[cfg(feature = "async")]
pub(crate) use prepared::Prepared;
