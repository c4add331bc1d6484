//! How two sides find each other and connect.

#[cfg(feature = "rdmacm")]
pub(crate) mod rdmacm;
#[cfg(feature = "channel")]
pub(crate) mod tcp;
