//! How two sides find each other and connect.

#[cfg(any(feature = "channel", feature = "rdmacm"))]
mod handshake;
#[cfg(feature = "rdmacm")]
pub(crate) mod rdmacm;
#[cfg(feature = "channel")]
pub(crate) mod tcp;

#[cfg(feature = "async")]
pub(crate) use handshake::Handshake;

/// The result of a step of something that runs in steps.
#[cfg(any(feature = "channel", feature = "rdmacm"))]
#[derive(Debug)]
#[must_use]
pub enum Step<D, P> {
    /// It is done, with this result.
    Done(D),
    /// It waits for the peer: continue with this when its file or its stream is ready.
    Pending(P),
}
