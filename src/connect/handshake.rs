//! The objects that can be connected, over a stream or by the connection manager.

#[cfg(feature = "async")]
use std::os::fd::BorrowedFd;

#[cfg(feature = "async")]
use crate::base::Result;
use crate::base::StateError;
#[cfg(feature = "rdmacm")]
use crate::base::{QueuePairType, ffi};
#[cfg(feature = "channel")]
use crate::channel::{Channel, PreparedChannel};
use crate::verbs::queue_pair::{Connected, PreparedQueuePair, QueuePair, QueuePairEndpoint};

/// The result of a step.
#[derive(Debug)]
#[must_use]
pub enum Step<D, P> {
    /// The handshake is done, with this result.
    Done(D),
    /// The handshake waits for the peer: continue with this when its file or its stream is ready.
    Pending(P),
}

/// A queue pair or channel in RESET. A bound of the public `Exchange`, and of the connection manager's `Connectable`.
pub trait Handshake: Sized {
    /// The connected form.
    type Connected;
    /// The connected object while its peer may still fail to connect.
    type Shaken;

    /// The address that the peer needs.
    fn endpoint(&self) -> QueuePairEndpoint;

    /// Takes the queue pair to RTS.
    fn handshake(self, remote: QueuePairEndpoint) -> Result<Self::Shaken, StateError<Self>>;

    /// Takes it back to RESET, because the peer has failed.
    fn take_back(shaken: Self::Shaken) -> Self;

    /// Keeps a duplicate of the socket below the stream that is about to connect it, to notice that the peer is gone; or
    /// with `None` gives it up. Returns whether it keeps it. Channels that a caller drives leave the socket to that.
    ///
    /// # Errors
    ///
    ///  - `EMFILE`, `ENFILE`, `ENOMEM`, `ENOSPC`: a resource has run out.
    #[cfg(feature = "async")]
    fn set_socket(&mut self, _socket: Option<BorrowedFd<'_>>) -> Result<bool> {
        Ok(false)
    }

    /// Notes whether the peer keeps the stream open as long as its channel.
    #[cfg(feature = "channel")]
    fn set_peer_keeps(_shaken: &mut Self::Shaken, _keeps: bool) {}

    /// Both sides are ready.
    fn finish(shaken: Self::Shaken) -> Self::Connected;

    #[cfg(feature = "rdmacm")]
    fn place(&self) -> (*mut ffi::ibv_context, QueuePairType);

    /// Called once the connection manager has taken the queue pair to INIT.
    #[cfg(feature = "rdmacm")]
    fn into_connected(self) -> Self::Connected;
}

impl<'res, T: Connected> Handshake for PreparedQueuePair<'res, T> {
    type Connected = QueuePair<'res, T>;
    type Shaken = QueuePair<'res, T>;

    fn endpoint(&self) -> QueuePairEndpoint {
        self.endpoint()
    }

    fn handshake(self, remote: QueuePairEndpoint) -> Result<QueuePair<'res, T>, StateError<Self>> {
        self.handshake(remote)
    }

    fn take_back(shaken: QueuePair<'res, T>) -> Self {
        shaken.into_prepared()
    }

    fn finish(shaken: QueuePair<'res, T>) -> QueuePair<'res, T> {
        shaken
    }

    #[cfg(feature = "rdmacm")]
    fn place(&self) -> (*mut ffi::ibv_context, QueuePairType) {
        self.queue_pair().place()
    }

    #[cfg(feature = "rdmacm")]
    fn into_connected(self) -> QueuePair<'res, T> {
        self.into_queue_pair()
    }
}

#[cfg(feature = "channel")]
impl<'res> Handshake for PreparedChannel<'res> {
    type Connected = Channel<'res>;
    type Shaken = Channel<'res>;

    fn endpoint(&self) -> QueuePairEndpoint {
        self.endpoint()
    }

    fn handshake(self, remote: QueuePairEndpoint) -> Result<Channel<'res>, StateError<Self>> {
        self.handshake(remote)
    }

    fn take_back(shaken: Channel<'res>) -> Self {
        shaken.into_prepared()
    }

    fn set_peer_keeps(shaken: &mut Channel<'res>, keeps: bool) {
        shaken.link.peer_keeps = keeps;
    }

    fn finish(shaken: Channel<'res>) -> Channel<'res> {
        shaken
    }

    #[cfg(feature = "rdmacm")]
    fn place(&self) -> (*mut ffi::ibv_context, QueuePairType) {
        self.link.queue_pair().place()
    }

    #[cfg(feature = "rdmacm")]
    fn into_connected(self) -> Channel<'res> {
        self.into_receiving()
    }
}
