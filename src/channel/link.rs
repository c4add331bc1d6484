//! The owner of a channel's queue pair, connected or not.

use std::fmt;
use std::mem::ManuallyDrop;
use std::net::TcpStream;
use std::sync::Arc;

use super::core::{Core, CoreSettings};
use super::in_flight::InFlight;
use super::router::{Inbox, Router};
use crate::error::{Error, Result};
use crate::queue_pair::{QueuePair, QueuePairEndpoint};
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
}

impl Drop for Link<'_> {
    fn drop(&mut self) {
        let _ = self.destroy();
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
        settings: &CoreSettings,
        table: InFlight,
        router: Option<(Arc<Router>, Inbox)>,
    ) -> Self {
        // SAFETY: the queue pair is live. The link owns it, and destroys it through the core only.
        let core = unsafe { Core::new(queue_pair.as_raw(), settings, table, router) };
        Self { core, queue_pair: ManuallyDrop::new(queue_pair), leaked: false, stream: None }
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

    /// To RESET, with nothing in flight and nothing in the completion queue.
    pub(super) fn reset(&mut self) -> Result<()> {
        if self.core.destroyed.get() {
            return Err(Error::invalid("ibv_modify_qp", "the queue pair had to be destroyed"));
        }
        self.core.close();
        self.core.reset()?;
        self.queue_pair.renew_psns();
        self.core.discard()?;
        trace::channel_reset(self.core.number);
        Ok(())
    }

    /// Destroys the queue pair, and says so if that fails.
    pub(super) fn close(mut self) -> Result<()> {
        self.destroy()
    }

    /// The destroy verb is called once, whatever it returns. So it must not be what ends operations that
    /// are in flight: unpolled ones may be, whose buffers may be freed next.
    fn destroy(&mut self) -> Result<()> {
        if !self.core.destroyed.get()
            && self.core.table.outstanding() > 0
            && self.core.reset().is_err()
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
