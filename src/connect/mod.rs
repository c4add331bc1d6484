//! How two sides find each other and connect.

#[cfg(feature = "rdmacm")]
pub(crate) mod rdmacm;
pub(crate) mod tcp;
