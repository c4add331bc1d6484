//! The objects that can be connected, over a stream or by the connection manager.

use crate::base::error::StateError;
#[cfg(feature = "rdmacm")]
use crate::base::ffi;
#[cfg(feature = "rdmacm")]
use crate::base::queue_pair_state::QueuePairType;
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
