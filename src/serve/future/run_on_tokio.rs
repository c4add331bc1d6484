//! Reactors that tasks of tokio run.

use std::future::Future;
use std::ops::Deref;
use std::os::fd::AsFd;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Poll, ready};

use super::locked_loop::{Lock, Locked, Share};
use super::reactor::Reactor;
use crate::base::{Error, Result, panics::catch};
use crate::channel::TransportError;
use crate::serve::pool::PooledBuffer;
use crate::verbs::device::on_tokio::{EVENTS, register};

impl<S: Share> Reactor<S> {
    /// Spawns a task on tokio that [runs](Self::run) the reactor. Dropping the returned value, which stands for the
    /// reactor, [stops](Self::stop) it, with [`ReactorGone`](TransportError::ReactorGone):
    ///
    /// ```no_run
    /// # // not on Soft-RoCE alone: needs a runtime
    /// # fn start(context: &std::sync::Arc<ibverbs::Context<'static>>, domain: &std::sync::Arc<ibverbs::ProtectionDomain<'static>>) -> ibverbs::Result<()> {
    /// let reactor = ibverbs::Reactor::new(context, 4096)?.spawn_on_tokio();
    /// let prepared = reactor.prepare(ibverbs::Channel::builder(domain))?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// An error that ends the task ends all operations; [`SpawnedReactor::ended`] returns it. It is `ECANCELED` if the
    /// runtime ended or a waker panicked. To outlive a runtime, [run](Self::run_on_tokio) the reactor on each of them
    /// instead.
    ///
    /// # Panics
    ///
    /// Those of [`run_on_tokio`](Self::run_on_tokio).
    pub fn spawn_on_tokio(self) -> SpawnedReactor<S>
    where
        S: Send + Sync + 'static,
    {
        let reactor = Arc::new(self);
        let spawned = Spawned(reactor.clone());
        // Moved now, so that it is dropped even if the task never runs.
        let task = Some(tokio::spawn(async move { spawned.0.run_on_tokio().await }));
        SpawnedReactor { reactor, task, ended: Ok(()) }
    }

    /// [Runs](Self::run) the reactor on tokio. Spawn it as a task, on a runtime of either kind; for
    /// [`Local`](crate::future::Local), on a `LocalSet`.
    ///
    /// # Errors
    ///
    /// Those of [`run`](Self::run), and what tokio reports when it registers the descriptor.
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime with I/O enabled ([`enable_io`](tokio::runtime::Builder::enable_io)).
    pub async fn run_on_tokio(&self) -> Result<()> {
        let file = register(self.as_fd()).or_else(|_| {
            // A peer may have put the provider's file into as many sets as the kernel allows.
            self.queue.detach(self.as_fd());
            register(self.as_fd())
        });
        let file = file.inspect_err(|&error| self.stop(TransportError::Verbs(error)))?;
        let mut ready = pin!(file.ready(EVENTS));
        self.run_by(
            || tokio::time::Instant::now().into_std(),
            |cx| {
                ready!(ready.as_mut().poll(cx))?.clear_ready();
                ready.set(file.ready(EVENTS));
                Poll::Ready(Ok(()))
            },
        )
        .await
    }
}

/// A reactor in a task of tokio: see [`Reactor::spawn_on_tokio`]. Dropping it stops the reactor, so tasks that all make
/// channels of it share it in an [`Arc`](std::sync::Arc).
#[derive(Debug)]
#[must_use = "dropping it stops the reactor"]
pub struct SpawnedReactor<S: Share = Locked<PooledBuffer>> {
    reactor: Arc<Reactor<S>>,
    task: Option<tokio::task::JoinHandle<Result<()>>>,
    ended: Result<()>,
}

impl<S: Share> SpawnedReactor<S> {
    /// Waits until the reactor has ended: `Ok` when it was [stopped](Reactor::stop). Later calls return the same.
    ///
    /// # Errors
    ///
    /// Those of [`Reactor::run_on_tokio`], and
    ///
    ///  - `ECANCELED`: the runtime has ended, or a waker has panicked in the task.
    pub async fn ended(&mut self) -> Result<()> {
        if let Some(task) = &mut self.task {
            self.ended = task.await.unwrap_or(Err(TASK_GONE));
            self.task = None;
        }
        self.ended
    }
}

impl<S: Share> Deref for SpawnedReactor<S> {
    type Target = Reactor<S>;

    fn deref(&self) -> &Reactor<S> {
        &self.reactor
    }
}

impl<S: Share> Drop for SpawnedReactor<S> {
    fn drop(&mut self) {
        let _ = catch(|| self.reactor.stop(TransportError::ReactorGone));
    }
}

const TASK_GONE: Error = Error::with_reason(
    "poll",
    libc::ECANCELED,
    "the task of spawn_on_tokio has ended, with its runtime or by the panic of a waker",
);

/// Stops the reactor however the spawned task ends.
struct Spawned<S: Share>(Arc<Reactor<S>>);

impl<S: Share> Drop for Spawned<S> {
    fn drop(&mut self) {
        let _ = catch(|| {
            if !self.0.share.lock().is_stopped {
                self.0.stop(TransportError::Verbs(TASK_GONE));
            }
        });
    }
}
