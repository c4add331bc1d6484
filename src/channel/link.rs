//! The queue pair of a channel and what it is used with, together in all states.

use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::Arc;

use super::core::{Core, CoreSettings};
use super::shared_completion_queue::{Inbox, Router};
use crate::error::{Error, Result};
use crate::queue_pair::ConnectionSettings;
use crate::queue_pair::{QueuePair, QueuePairEndpoint};

/// Owns the queue pair and the core that uses it.
pub(crate) struct Link<'res> {
    pub(crate) core: Arc<Core>,
    endpoint: QueuePairEndpoint,
    /// Its C object is gone if `core.destroyed` says so; its parents are there in any case.
    queue_pair: ManuallyDrop<QueuePair<'res>>,
}

impl Drop for Link<'_> {
    fn drop(&mut self) {
        if !self.core.destroyed.get()
            && self.core.destroy().is_err()
            && self.core.table.outstanding() > 0
        {
            // Unpolled work is outstanding, whose buffers may be gone next.
            self.core.stop();
        }
        if self.core.destroyed.get()
            && let Some((router, inbox)) = &self.core.router
        {
            router.release(*inbox);
        }
        // SAFETY: it is taken once, here. The C object is gone or leaked; the completion queue, which
        // the router has used just now, goes with the parents.
        unsafe { ManuallyDrop::take(&mut self.queue_pair) }.disown();
    }
}

impl<'res> Link<'res> {
    /// The link of a queue pair in the RESET state, whose completion queues are one, for this link
    /// alone or behind the router.
    pub(crate) fn new(
        queue_pair: QueuePair<'res>,
        endpoint: QueuePairEndpoint,
        settings: &CoreSettings,
        router: Option<(Arc<Router>, Inbox)>,
    ) -> Self {
        // SAFETY: the queue pair is live, and the link destroys it through the core alone; nobody
        // else has it.
        let core = unsafe { Core::new(queue_pair.as_raw(), settings, router) };
        Self { core, endpoint, queue_pair: ManuallyDrop::new(queue_pair) }
    }

    pub(crate) fn endpoint(&self) -> QueuePairEndpoint {
        self.endpoint
    }

    pub(crate) fn settings(&self) -> &ConnectionSettings {
        self.queue_pair.settings()
    }

    pub(crate) fn settings_mut(&mut self) -> &mut ConnectionSettings {
        self.queue_pair.settings_mut()
    }

    /// RESET to RTS, with nothing in flight.
    pub(crate) fn connect(&mut self, remote: &QueuePairEndpoint) -> Result<()> {
        self.queue_pair.connect(Some(remote))?;
        self.core.open();
        Ok(())
    }

    /// To RESET, with nothing in flight and nothing in the completion queue.
    pub(crate) fn reset(&mut self) -> Result<()> {
        if self.core.destroyed.get() {
            return Err(Error::invalid("ibv_modify_qp", "the queue pair had to be destroyed"));
        }
        self.core.close();
        self.core.reset()?;
        self.core.discard()
    }

    /// Destroys the queue pair, or gives the link back with the reason why that failed.
    pub(crate) fn close(self) -> Result<(), (Self, Error)> {
        if !self.core.destroyed.get()
            && let Err(error) = self.core.destroy()
        {
            return Err((self, error));
        }
        Ok(())
    }
}

impl fmt::Debug for Link<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Link")
            .field("endpoint", &self.endpoint)
            .field("core", &self.core)
            .finish_non_exhaustive()
    }
}
