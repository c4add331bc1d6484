//! Drives the futures of a loop's channels.

use std::fmt;
use std::future::poll_fn;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
#[cfg(feature = "tokio")]
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context as TaskContext, Poll};
use std::time::Instant;
#[cfg(feature = "tokio")]
use std::{future::Future, task::ready};

use super::LoopChannel;
use super::share::{Share, State, release, release_quietly};
use crate::channel::{Channel, ChannelBuilder, Loop, Queue, TransportError};
use crate::completion::CompletionQueue;
use crate::device::Context;
#[cfg(feature = "tokio")]
use crate::device::on_tokio::{EVENTS, register};
use crate::domain::ProtectionDomain;
use crate::error::{Error, Result};
use crate::many::reactor::Alarms;
use crate::parent::Parent;
use crate::state_error::StateError;

/// Drives the [`LoopChannel`]s of one [`Loop`], within any runtime or event loop.
///
/// The futures are those of one thread, or `Send`, as `S` says: [`Local`](crate::Local) or [`Locked`](crate::Locked),
/// with the type of all buffers.
///
/// With feature `tokio`, spawn `LoopReactor::run_on_tokio`. Elsewhere, [`run`](Self::run) does the same with the runtime's
/// own way to wait for a descriptor. A hand-written loop calls [`turn`](Self::turn) and [`arm`](Self::arm):
///
/// ```
/// # let rxe0 = ibverbs_software::Device::builder().name("rxe0").build().unwrap();
/// # rxe0.register();
/// # use std::sync::Arc;
/// use ibverbs::{BufferPool, Local, LoopChannel, LoopReactor, OperationError, PooledBuffer};
///
/// /// Answers each message with itself.
/// async fn serve(
///     channel: LoopChannel<Local<PooledBuffer>>,
///     mut buffer: PooledBuffer,
/// ) -> Result<(), OperationError<PooledBuffer>> {
///     loop {
///         let (message, _) = channel.receive(buffer).await?;
///         (buffer, _) = channel.send(message).await?;
///     }
/// }
///
/// # fn sleep_until_readable<S: ibverbs::Share>(_: &LoopReactor<S>) {}
/// # fn run_tasks() {}
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let context = Arc::new(ibverbs::open("rxe0")?);
/// let reactor = LoopReactor::<Local<PooledBuffer>>::new(&context, 1024)?;
/// loop {
///     while reactor.turn()? > 0 {
///         run_tasks();
///     }
///     reactor.arm()?;
///     // Once more: what came before the queue was armed raises no event.
///     if reactor.turn()? == 0 {
///         sleep_until_readable(&reactor); // with `AsFd`
///     }
///     # break;
/// }
/// # Ok(())
/// # }
/// ```
///
/// Dropping the reactor ends all operations of its channels; their futures return
/// [`Stopped`](TransportError::Stopped).
pub struct LoopReactor<S: Share> {
    share: S,
    queue: Arc<CompletionQueue<'static>>,
    alarms: Arc<Alarms>,
    spin: u32,
}

impl<S: Share> LoopReactor<S> {
    /// `ibv_create_comp_channel`, `ibv_create_cq`: a reactor whose channels can have `entries` operations in flight,
    /// together: see [`Loop::capacity`].
    ///
    /// # Errors
    ///
    ///  - Those of [`Loop::new`].
    ///  - `EMFILE`, `ENFILE`: the process, or the machine, has too many files open. A reactor has three.
    #[doc(alias = "ibv_create_cq")]
    pub fn new(
        context: impl Into<Parent<'static, Context<'static>>>,
        entries: u32,
    ) -> Result<Self> {
        let core = Loop::new(context, entries)?;
        let alarms = Arc::new(Alarms::new(core.as_fd())?);
        let queue = core.queue().clone();
        Ok(Self { share: S::new(State::new(core, alarms.clone())), queue, alarms, spin: 0 })
    }

    /// Sets the number of turns that find nothing before [`run`](Self::run) sleeps (0 unless set). Between two turns the
    /// other tasks of the runtime run. More means lower latency and a busy CPU.
    #[must_use]
    pub fn spin(mut self, turns: u32) -> Self {
        self.spin = turns;
        self
    }

    /// Starts to build a channel of the reactor, which is to be [added](Self::add) when it is connected.
    pub fn create_channel(
        &self,
        domain: impl Into<Parent<'static, ProtectionDomain<'static>>>,
    ) -> ChannelBuilder<'static> {
        // Into what is the caller's affair.
        let domain = domain.into();
        self.share.lock().core.create_channel(domain)
    }

    /// See [`Loop::capacity`].
    pub fn capacity(&self) -> (u32, u32) {
        self.share.lock().core.capacity()
    }

    /// Adds a channel that the reactor has [created](Self::create_channel), and that is connected.
    ///
    /// # Errors
    ///
    /// Those of [`Loop::add`], with the channel.
    pub fn add(
        &self,
        channel: Channel<'static>,
    ) -> Result<LoopChannel<S>, StateError<Channel<'static>>> {
        let id = self.share.lock().core.add(channel)?;
        Ok(LoopChannel { share: self.share.clone(), id })
    }

    /// `ibv_poll_cq`: polls once, for up to sixteen completions, without waiting, and wakes the tasks whose operations
    /// have ended. Returns the number of completions: if it is not 0, there may be more. Those that the device has made up
    /// are counted, and end nothing.
    ///
    /// # Errors
    ///
    /// Polling failed, which ends nothing.
    #[doc(alias = "ibv_poll_cq")]
    #[inline]
    pub fn turn(&self) -> Result<usize> {
        let mut guard = self.share.lock();
        let turned = guard.core.turn();
        if guard.core.lacks_credit() || guard.alarm.is_some() {
            guard.serve_credit();
        }
        release(&self.share, guard);
        match turned {
            Ok(count) => Ok(count),
            Err(TransportError::Verbs(error)) => Err(error),
            Err(_) => Ok(1),
        }
    }

    /// `ibv_req_notify_cq`: from now on, the next completion makes the descriptor readable. Call [`turn`](Self::turn)
    /// between this and sleeping.
    ///
    /// # Errors
    ///
    ///  - `EIO`: the device is gone.
    #[doc(alias = "ibv_req_notify_cq")]
    pub fn arm(&self) -> Result<()> {
        self.queue.rearm_own()
    }

    /// `ibv_modify_qp`: ends all operations of all channels, because polling or sleeping has failed, or the program wants
    /// to stop. Nothing can be posted after that; futures return `error`, or how their operation has ended. A task in
    /// [`run`](Self::run) ends.
    #[doc(alias = "ibv_modify_qp")]
    pub fn stop(&self, error: TransportError) {
        release(&self.share, self.stopped(error));
    }

    fn stopped(&self, error: TransportError) -> S::Guard<'_> {
        let mut guard = self.share.lock();
        let state = &mut *guard;
        if state.stopped.is_none() {
            state.stopped = Some(error);
            state.core.stop_all();
            state.core.later().woken.extend(state.runner.take());
        }
        guard
    }

    /// Runs the reactor: polls, spins for the [set number of turns](Self::spin), then arms the queue and sleeps. It returns
    /// when the reactor is [stopped](Self::stop), or after an error, which ends all operations of all channels.
    ///
    /// `poll_readable` waits for the descriptor ([`AsFd`]) as the runtime does it: it returns [`Poll::Ready`] if the
    /// descriptor may have become readable, or has got an error, since the last call, and otherwise has the task woken
    /// then. The descriptor has an error when the device is pulled out; the reactor then ends with `EIO`.
    ///
    /// Run it in one task at a time. If that task is dropped, the channels' futures wait until it is run again.
    ///
    /// # Errors
    ///
    /// Those of [`turn`](Self::turn), [`arm`](Self::arm) and `poll_readable`.
    pub async fn run<F>(&self, mut poll_readable: F) -> Result<()>
    where
        F: FnMut(&mut TaskContext<'_>) -> Poll<io::Result<()>>,
    {
        let mut running = Running::default();
        let ended = poll_fn(|cx| self.poll_run(&mut running, cx, &mut poll_readable)).await;
        if let Err(error) = ended {
            self.stop(TransportError::Verbs(error));
        }
        ended
    }

    fn poll_run<F>(
        &self,
        running: &mut Running,
        cx: &mut TaskContext<'_>,
        mut poll_readable: F,
    ) -> Poll<Result<()>>
    where
        F: FnMut(&mut TaskContext<'_>) -> Poll<io::Result<()>>,
    {
        // First, so that a stop after the turn wakes this task.
        if self.set_runner(cx) {
            return Poll::Ready(Ok(()));
        }
        loop {
            if self.turn()? > 0 {
                *running = Running::default();
                break;
            }
            if std::mem::take(&mut running.woken) {
                // An edge-triggered runtime tells only once that the descriptor has an error.
                self.queue.check_device()?;
            }
            if running.armed {
                match poll_readable(cx) {
                    Poll::Pending => return Poll::Pending,
                    Poll::Ready(Ok(())) => *running = Running { woken: true, ..Running::default() },
                    Poll::Ready(Err(error)) => {
                        let errno = error.raw_os_error().unwrap_or(libc::EIO);
                        return Poll::Ready(Err(Error::new("poll", errno)));
                    }
                }
                break;
            }
            if running.idle < self.spin {
                running.idle += 1;
                break;
            }
            // And once more: what came before the queue was armed raises no event.
            self.arm()?;
            running.armed = true;
        }
        // Other tasks run first.
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    /// Returns whether the reactor was stopped.
    fn set_runner(&self, cx: &TaskContext<'_>) -> bool {
        let guard = self.share.lock();
        let is_same = guard.runner.as_ref().is_some_and(|own| own.will_wake(cx.waker()));
        let is_stopped = guard.stopped.is_some();
        drop(guard);
        if is_same || is_stopped {
            return is_stopped;
        }
        let waker = cx.waker().clone();
        let mut guard = self.share.lock();
        let (before, is_stopped) = (guard.runner.replace(waker), guard.stopped.is_some());
        drop(guard);
        drop(before);
        is_stopped
    }

    /// Runs the reactor on tokio: see [`run`](Self::run). To be spawned as a task, on a runtime of either kind; of
    /// [`Local`](crate::Local), on a `LocalSet`.
    ///
    /// # Errors
    ///
    /// Those of [`run`](Self::run), and what tokio reports when it registers the descriptor.
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime whose I/O is enabled
    /// ([`enable_io`](tokio::runtime::Builder::enable_io)).
    #[cfg(feature = "tokio")]
    pub async fn run_on_tokio(&self) -> Result<()> {
        let file = register(self.as_fd())?;
        let mut ready = pin!(file.ready(EVENTS));
        self.run(|cx| {
            ready!(ready.as_mut().poll(cx))?.clear_ready();
            ready.set(file.ready(EVENTS));
            Poll::Ready(Ok(()))
        })
        .await
    }
}

/// What a task that runs a reactor remembers.
#[derive(Default)]
struct Running {
    /// Turns in a row that found nothing.
    idle: u32,
    /// Whether the queue was armed, and nothing was found since.
    armed: bool,
    /// Whether the descriptor was readable, and nothing was found since.
    woken: bool,
}

impl<B> State<B> {
    /// Wakes the tasks that lacked credit and have some now.
    #[cold]
    fn serve_credit(&mut self) {
        if self.alarm.is_some_and(|at| at <= Instant::now()) {
            self.alarm = None;
            let _ = self.alarms.take_due();
        }
        while let Some(channel) = self.core.next_credited() {
            self.core.wake_line(channel, Queue::Send);
        }
        self.set_alarm();
    }

    /// Has the descriptor become readable when peers are to be asked for credit again.
    #[cold]
    pub(super) fn set_alarm(&mut self) {
        let Some(pause) = self.core.credit_pause() else { return };
        let at = Instant::now() + pause;
        if self.alarm.is_none_or(|set| at < set) {
            self.alarm = Some(at);
            self.alarms.set(at, 0);
        }
    }
}

impl<S: Share> AsFd for LoopReactor<S> {
    /// The file that is readable when [`turn`](LoopReactor::turn) has something to do. Only wait for it.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.alarms.ready()
    }
}

impl<S: Share> AsRawFd for LoopReactor<S> {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

impl<S: Share> Drop for LoopReactor<S> {
    fn drop(&mut self) {
        release_quietly(&self.share, self.stopped(TransportError::Stopped));
    }
}

impl<S: Share> fmt::Debug for LoopReactor<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LoopReactor").field("queue", &self.queue).finish_non_exhaustive()
    }
}
