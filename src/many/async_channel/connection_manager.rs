//! Asynchronous channels that the connection manager connects.

use super::{AsyncChannel, PreparedAsyncChannel};
use crate::channel::TransportError;
use crate::connect::rdmacm::Connectable;
use crate::connect::rdmacm::in_a_thread;
use crate::connect::rdmacm::sealed::{Connected, Object, Settings};
use crate::error::Result;
use crate::ffi;
use crate::memory::RemoteMemoryRegion;

impl Connectable for PreparedAsyncChannel {}

impl Object for PreparedAsyncChannel {
    fn settings(&self) -> Settings {
        self.prepared().settings()
    }

    fn agree(&self, theirs: Option<RemoteMemoryRegion>) -> Result<()> {
        self.prepared().agree(theirs)
    }

    fn modify(&mut self, attributes: &mut ffi::ibv_qp_attr, mask: u32) -> Result<()> {
        self.prepared_mut().modify(attributes, mask)
    }
}

impl Object for AsyncChannel {
    fn settings(&self) -> Settings {
        self.shared.with(|state| state.channel.settings())
    }

    fn agree(&self, theirs: Option<RemoteMemoryRegion>) -> Result<()> {
        self.shared.with(|state| state.channel.agree(theirs))
    }

    fn modify(&mut self, attributes: &mut ffi::ibv_qp_attr, mask: u32) -> Result<()> {
        self.shared.with(|state| state.channel.modify(attributes, mask))
    }
}

impl Connected for AsyncChannel {
    fn established(&mut self) {
        self.shared.with(|state| state.channel.allow_sends());
    }

    /// The channel cannot be used again. Its futures return [`Stopped`](TransportError::Stopped).
    fn end(&mut self) {
        // A waker that panics must not keep the caller from telling the peer, or from releasing a device that was removed.
        self.shared.end(TransportError::Stopped).forget();
    }

    fn give_up(self, id: impl Send + 'static) {
        in_a_thread(self, id);
    }
}
