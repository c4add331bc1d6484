use super::locked_loop::{Lock, Locked, Share, destroy, release_quietly};
use crate::base::debug;
#[cfg(doc)]
use crate::channel::TransportError;
use crate::serve::event_loop::ChannelId;
use crate::serve::pool::PooledBuffer;

/// A channel whose operations are futures that own their buffers. A [`Reactor`](crate::Reactor) drives it, on any runtime.
///
/// [`Reactor::prepare`](crate::Reactor::prepare) makes one. Any number of tasks can use it; its futures borrow it.
///
/// # Cancelling
///
/// A future may be dropped at any time. No drop waits for the device:
///
/// | dropped | the operation | the buffer |
/// |---|---|---|
/// | before its first poll, or while it waits for room | is never posted | is dropped with the future |
/// | after that | goes on | is dropped when the device is done with it (a pooled buffer goes back to its pool) |
/// | a receive | loses its turn. **No message is lost**: what arrives in its buffer goes to another receive, in order | holds a later message |
///
/// A forgotten future ([`mem::forget`](std::mem::forget)) leaks its buffer and its place in the queue until the channel
/// is dropped. If it was waiting for room, all later operations wait behind it.
///
/// # When it ends
///
/// When the peer dies or leaves, the reactor notices by the stream's socket or the connection manager: all operations end
/// with [`PeerGone`](TransportError::PeerGone), after the messages that have arrived.
///
/// After an operation has failed ([`Work`](TransportError::Work)), all later ones fail too; make a new channel to
/// connect again. Dropping the channel calls `ibv_destroy_qp`, with no lock held. Once its reactor is dropped,
/// operations return [`ReactorGone`](TransportError::ReactorGone).
pub struct AsyncChannel<S: Share = Locked<PooledBuffer>> {
    pub(super) share: S,
    pub(super) id: ChannelId,
    pub(super) number: u32,
}

impl<S: Share> AsyncChannel<S> {
    /// The number of the queue pair.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// How many messages may be sent before the peer is asked again: see [`Channel::credits`](crate::Channel::credits).
    pub fn credits(&self) -> Option<u32> {
        self.share.lock().core.credits(self.id)
    }

    /// The number of operations that the device has.
    pub fn in_flight(&self) -> usize {
        self.share.lock().core.in_flight(self.id)
    }
}

impl<S: Share> Drop for AsyncChannel<S> {
    fn drop(&mut self) {
        let mut guard = self.share.lock();
        let detached = guard.core.detach(self.id);
        release_quietly(guard);
        if let Some(detached) = detached {
            destroy(&self.share, detached);
        }
    }
}

debug! { impl[S: Share] AsyncChannel<S>, self, id: self.id, .. }
