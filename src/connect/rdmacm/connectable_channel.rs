//! Channels, which can be connected as queue pairs can.

use super::Connectable;
use super::connectable::sealed::{self, Object, Settings};
use crate::channel::{Channel, PreparedChannel};
use crate::error::Result;
use crate::ffi;
use crate::memory::RemoteMemoryRegion;

impl Connectable for PreparedChannel<'_> {}

impl Object for PreparedChannel<'_> {
    fn settings(&self) -> Settings {
        Settings { credit_word: self.credit_word(), ..Object::settings(self.queue_pair()) }
    }

    fn place(&self) -> (*mut ffi::ibv_context, bool) {
        self.queue_pair().place()
    }

    fn agree(&self, theirs: Option<RemoteMemoryRegion>) -> Result<()> {
        self.set_peer_credit_word(theirs)
    }

    fn modify(&mut self, attributes: &mut ffi::ibv_qp_attr, mask: u32) -> Result<()> {
        Object::modify(self.live_queue_pair()?, attributes, mask)
    }
}

impl<'res> sealed::Prepared for PreparedChannel<'res> {
    type Connected = Channel<'res>;

    fn into_connected(self) -> Channel<'res> {
        self.into_receiving()
    }
}

impl Object for Channel<'_> {
    fn settings(&self) -> Settings {
        Settings { credit_word: self.credit_word(), ..Object::settings(self.queue_pair()) }
    }

    fn place(&self) -> (*mut ffi::ibv_context, bool) {
        self.queue_pair().place()
    }

    fn agree(&self, theirs: Option<RemoteMemoryRegion>) -> Result<()> {
        self.set_peer_credit_word(theirs)
    }

    fn modify(&mut self, attributes: &mut ffi::ibv_qp_attr, mask: u32) -> Result<()> {
        Object::modify(self.live_queue_pair()?, attributes, mask)
    }
}

impl sealed::Connected for Channel<'_> {
    fn established(&mut self) {
        self.allow_sends();
    }

    fn end(&mut self) {
        // If this fails, the operations stay in flight until the channel is dropped.
        let _ = self.try_end();
    }
}
