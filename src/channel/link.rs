//! The owner of a channel's queue pair, connected or not.

use std::fmt;
use std::mem::{self, ManuallyDrop};
use std::net::TcpStream;
use std::sync::Arc;

use super::core::{Core, CoreSettings};
use super::in_flight::InFlight;
use super::router::{Inbox, Router};
use crate::error::{Error, ErrorKind, Result};
use crate::ffi;
use crate::queue_pair::{ConnectionSettings, QueuePair, QueuePairEndpoint};
use crate::trace;

/// Owns the queue pair and the core that uses it.
pub(super) struct Link<'res> {
    pub(super) core: Arc<Core>,
    /// The destroy verb was called on its C object if `core.destroyed` says so. It keeps its parents alive
    /// in any case.
    queue_pair: ManuallyDrop<QueuePair<'res>>,
    /// The destroy verb failed.
    leaked: bool,
    /// Over which the two sides have connected, if they did so over TCP. It is closed after the queue
    /// pair is destroyed.
    pub(super) stream: Option<TcpStream>,
    recipe: Recipe,
}

/// What a channel makes its queue pairs with: the first one, and one for each reset.
#[derive(Clone, Copy, Debug)]
pub(super) struct Recipe {
    pub(super) capacities: ffi::ibv_qp_cap,
    pub(super) connection: ConnectionSettings,
}

impl Drop for Link<'_> {
    fn drop(&mut self) {
        let _ = self.destroy();
        // Handles may keep the core for longer.
        self.core.drop_owned_buffers();
        // Completions of a leaked queue pair go to its inbox.
        if !self.leaked
            && let Some((router, inbox)) = &self.core.router
        {
            router.release(*inbox);
        }
        // SAFETY: it is taken once, here. The C object was destroyed or is leaked. The completion queue,
        // which the router has just used, is dropped with the parents.
        unsafe { ManuallyDrop::take(&mut self.queue_pair) }.disown(!self.leaked);
    }
}

impl<'res> Link<'res> {
    /// The link of a queue pair in the RESET state. Its send and receive completion queue are the same,
    /// which only this link uses, or only the router.
    pub(super) fn new(
        queue_pair: QueuePair<'res>,
        recipe: Recipe,
        settings: &CoreSettings,
        table: InFlight,
        router: Option<(Arc<Router>, Inbox)>,
    ) -> Self {
        // SAFETY: the queue pair is live. The link owns it, and destroys it through the core only.
        let core = unsafe { Core::new(queue_pair.as_raw(), settings, table, router, None) };
        Self {
            core,
            queue_pair: ManuallyDrop::new(queue_pair),
            leaked: false,
            stream: None,
            recipe,
        }
    }

    pub(super) fn endpoint(&self) -> QueuePairEndpoint {
        self.queue_pair.endpoint()
    }

    /// Not to be posted to, nor changed in its state: that is for the core.
    pub(super) fn queue_pair(&self) -> &QueuePair<'res> {
        &self.queue_pair
    }

    /// As above, to change what the next connection is made with.
    pub(super) fn queue_pair_mut(&mut self) -> &mut QueuePair<'res> {
        &mut self.queue_pair
    }

    /// The queue pair, unless its C object is gone.
    #[cfg(feature = "rdmacm")]
    pub(super) fn live_queue_pair(&mut self) -> Result<&mut QueuePair<'res>> {
        if self.core.destroyed.get() {
            return Err(Error::invalid("ibv_modify_qp", "the queue pair had to be destroyed"));
        }
        Ok(&mut self.queue_pair)
    }

    /// RESET to RTS, with nothing in flight.
    pub(super) fn connect(&mut self, remote: &QueuePairEndpoint) -> Result<()> {
        self.queue_pair.connect(Some(remote))?;
        self.core.open();
        trace::channel_connected(self.core.number, remote.num());
        Ok(())
    }

    /// To RESET, with nothing in flight and nothing in the completion queue, and to another queue pair.
    ///
    /// Packets name the queue pair that they are for, but not the one that they come from. So what the
    /// peer of the old connection still sends would reach the new one, if that had the same number, and
    /// no wait on this side would help: the peer decides for how long it sends again. The packet numbers
    /// alone do not help either, as a late acknowledgement counts for all packets before its number.
    pub(super) fn reset(&mut self) -> Result<()> {
        if self.core.destroyed.get() {
            return Err(Error::invalid("ibv_modify_qp", "the queue pair had to be destroyed"));
        }
        self.core.close();
        self.core.reset()?;
        self.core.discard()?;
        trace::channel_reset(self.core.number);
        match self.replace_queue_pair() {
            // The device has no room for a second one. The first has random packet numbers at least.
            Err(error) if error.kind() == ErrorKind::Resource => {
                self.queue_pair.renew_psns();
                Ok(())
            }
            result => result,
        }
    }

    /// Creates another queue pair of the same kind, and destroys the present one, which is in RESET.
    fn replace_queue_pair(&mut self) -> Result<()> {
        let Recipe { capacities, mut connection } = self.recipe;
        // Those are of the first connection.
        (connection.send_psn, connection.receive_psn) = (None, None);
        let table = InFlight::new(capacities.max_send_wr, capacities.max_recv_wr)?;
        let fresh = self.queue_pair.another(capacities, connection)?;
        let router = self.core.router.clone();
        if let Some((router, inbox)) = &router {
            router.renumber(*inbox, fresh.number());
        }
        let mut settings = self.core.settings();
        settings.limits.max_inline_data = fresh.max_inline_data();
        // SAFETY: the queue pair is live. The link owns it, and destroys it through the core only.
        let core =
            unsafe { Core::new(fresh.as_raw(), &settings, table, router, Some(&*self.core)) };
        let old_core = mem::replace(&mut self.core, core);
        let old = mem::replace(&mut self.queue_pair, ManuallyDrop::new(fresh));
        let destroyed = old_core.destroy();
        // Everything has ended with the reset. Handles may keep the core for longer.
        old_core.drop_owned_buffers();
        ManuallyDrop::into_inner(old).disown(destroyed.is_ok());
        destroyed
    }

    /// Destroys the queue pair, and says so if that fails.
    pub(super) fn close(mut self) -> Result<()> {
        self.destroy()
    }

    /// The destroy verb is called once, whatever it returns. So it must not be what ends operations that
    /// are in flight: unpolled ones may be, whose buffers may be freed next. Operations that own their
    /// buffers can wait for it: if it fails, the buffers are leaked.
    fn destroy(&mut self) -> Result<()> {
        if !self.core.destroyed.get()
            && self.core.table.outstanding() > 0
            && self.core.reset().is_err()
            && self.core.table.outstanding_borrowed() > 0
        {
            self.core.stop();
        }
        if self.core.destroyed.get() {
            return Ok(());
        }
        self.core.destroy().inspect_err(|_| self.leaked = true)
    }
}

impl fmt::Debug for Link<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Link")
            .field("endpoint", &self.endpoint())
            .field("core", &self.core)
            .finish_non_exhaustive()
    }
}
