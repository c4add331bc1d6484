//! What can be connected, over a stream or by the connection manager: queue pairs and channels.

#[cfg(feature = "rdmacm")]
pub use manager::{Connected, Object, Settings};

use crate::queue_pair::{Connected as HasPeer, PreparedQueuePair, QueuePair, QueuePairType};
use crate::queue_pair::QueuePairEndpoint;
use crate::state_error::StateError;

/// A queue pair or channel in RESET.
pub trait Prepared: Sized {
    /// The connected form.
    type Connected;
    /// Its queue pair is in RTS, but nobody knows yet whether the peer's is too.
    type Shaken;
}

