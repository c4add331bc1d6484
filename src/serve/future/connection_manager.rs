//! Asynchronous channels that the connection manager connects.

use std::thread;

use super::locked_loop::{Lock, Share, put_back, stop};
use super::{AsyncChannel, PreparedAsyncChannel};
use crate::base::{Result, ffi, panics::catch};
use crate::channel::TransportError;
use crate::channel::parts::PeerSign;
use crate::connect::rdmacm::Connectable;
use crate::connect::rdmacm::sealed::{Connected, Object, Settings};
use crate::serve::event_loop::Detached;
use crate::verbs::memory::RemoteMemoryRegion;

impl<S: Share> Connectable for PreparedAsyncChannel<S> {}

impl<S: Share> Object for PreparedAsyncChannel<S> {
    fn settings(&self) -> Settings {
        self.channel().settings()
    }

    fn agree(&self, theirs: Option<RemoteMemoryRegion>) -> Result<()> {
        self.channel().agree(theirs)
    }

    fn modify(&mut self, attributes: &mut ffi::ibv_qp_attr, mask: u32) -> Result<()> {
        self.detached_mut().channel.modify(attributes, mask)
    }
}

impl<S: Share> AsyncChannel<S> {
    fn with_detached<R>(&self, f: impl FnOnce(&mut Detached<'static>) -> R) -> R {
        let mut detached = loop {
            let mut guard = self.share.lock();
            let out = guard.core.borrow_out(self.id);
            guard.unlock();
            match out {
                Some(detached) => break detached,
                // Another thread has taken it out to call a verb.
                None => thread::yield_now(),
            }
        };
        let result = f(&mut detached);
        put_back(&self.share, detached, None);
        result
    }
}

impl<S: Share> Object for AsyncChannel<S> {
    fn settings(&self) -> Settings {
        self.with_detached(|detached| detached.channel.settings())
    }

    fn agree(&self, theirs: Option<RemoteMemoryRegion>) -> Result<()> {
        self.with_detached(|detached| detached.channel.agree(theirs))
    }

    fn modify(&mut self, attributes: &mut ffi::ibv_qp_attr, mask: u32) -> Result<()> {
        self.with_detached(|detached| detached.channel.modify(attributes, mask))
    }
}

impl<S: Share> Connected for AsyncChannel<S> {
    fn established(&mut self) {
        let mut guard = self.share.lock();
        guard.core.establish(self.id);
    }

    /// The channel cannot be used again. Its futures return [`Stopped`](TransportError::Stopped).
    fn end(&mut self) {
        // If a waker panics, the caller must still tell the peer, or release a removed device.
        let _ = catch(|| stop(&self.share, self.id, TransportError::Stopped));
    }

    fn watch(&mut self, sign: Box<dyn PeerSign>) -> Result<()> {
        self.share.lock().core.prepare_watch(Some(&*sign))?;
        self.with_detached(|detached| detached.channel.link.set_sign(sign));
        Ok(())
    }
}
