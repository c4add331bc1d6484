//! Drives the futures of many channels.

mod alarms;
mod registry;
mod run;
#[cfg(feature = "tokio")]
mod tokio;

pub(super) use alarms::Alarms;
pub(crate) use registry::Registry;
pub use run::ReactorRun;

use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context as TaskContext, Poll};
use std::time::Instant;

use super::async_channel::PreparedAsyncChannel;
use crate::channel::{
    ChannelBuilder, DEVICE_CHECK_PERIOD, Found, SharedCompletionQueue, TransportError,
};
use crate::device::Context;
use crate::error::Result;
use crate::parent::Parent;

/// Turns that find nothing between two readings of the clock. Few, because a program may sleep between its turns.
const TURNS_PER_CLOCK_READING: u32 = 64;

/// Channels that are served before other tasks get a turn.
const CHANNELS_PER_TURN: usize = 64;

/// Drives the [`AsyncChannel`](crate::AsyncChannel)s of one completion queue, within any runtime or event
/// loop.
///
/// With feature `tokio`, spawn `Reactor::run_on_tokio`. Elsewhere, [`run`](Self::run) does the
/// same with the runtime's own way to wait for a descriptor. A hand-written loop calls
/// [`turn`](Self::turn) and [`arm`](Self::arm):
///
/// ```
/// # let rxe0 = ibverbs_software::Device::builder().name("rxe0").build().unwrap();
/// # rxe0.register();
/// # fn sleep_until_readable(_: &ibverbs::Reactor) {}
/// # fn run_other_tasks() {}
/// # fn run(reactor: &ibverbs::Reactor) -> ibverbs::Result<()> {
/// loop {
///     while reactor.turn()? > 0 {
///         run_other_tasks();
///     }
///     reactor.arm()?;
///     // Once more: what came before the queue was armed raises no event.
///     if reactor.turn()? == 0 {
///         sleep_until_readable(reactor); // with `AsFd`
///     }
///     # break;
/// }
/// # Ok(())
/// # }
/// ```
///
/// One wake-up serves all completions that are there. Each wakes the task of its own operation only.
///
/// Dropping the reactor ends all operations of its channels; their futures return
/// [`Stopped`](TransportError::Stopped).
pub struct Reactor {
    registry: Arc<Registry>,
    spin: u32,
    /// The turns that found nothing, around the end.
    idle_turns: AtomicU32,
    /// When the device was last checked, or when the first check was due.
    device_checked: Mutex<Option<Instant>>,
}

impl Reactor {
    /// `ibv_create_comp_channel`, `ibv_create_cq`: creates a reactor whose completion queue has room for
    /// at least `entries` completions. Each channel needs its
    /// [`max_send_wr`](ChannelBuilder::max_send_wr) plus [`max_recv_wr`](ChannelBuilder::max_recv_wr).
    ///
    /// # Errors
    ///
    ///  - Those of [`CompletionQueue::new`](crate::CompletionQueue::new) and
    ///    [`CompletionChannel::new`](crate::CompletionChannel::new).
    ///  - `EMFILE`, `ENFILE`: the process, or the machine, has too many files open. A reactor has three.
    #[doc(alias = "ibv_create_cq")]
    pub fn new(
        context: impl Into<Parent<'static, Context<'static>>>,
        entries: u32,
    ) -> Result<Self> {
        let queue = SharedCompletionQueue::with_event_channel(context, entries)?;
        Ok(Self {
            registry: Arc::new(Registry::new(queue)?),
            spin: 0,
            idle_turns: AtomicU32::new(0),
            device_checked: Mutex::default(),
        })
    }

    /// Sets the number of turns that find nothing before [`run`](Self::run) sleeps (0 unless set). Between
    /// two turns the other tasks of the runtime run. More means lower latency and a busy CPU.
    #[must_use]
    pub fn spin(mut self, turns: u32) -> Self {
        self.spin = turns;
        self
    }

    /// The part of the completion queue's capacity that no channel has reserved.
    pub fn available(&self) -> u32 {
        self.registry.queue.available()
    }

    /// `ibv_create_qp`: creates the queue pair of an [`AsyncChannel`](crate::AsyncChannel), on the
    /// reactor's completion queue.
    ///
    /// # Errors
    ///
    /// Those of [`ChannelBuilder::build`], and `EINVAL` if the builder was told to
    /// [sleep](ChannelBuilder::sleep_after).
    #[doc(alias = "ibv_create_qp")]
    pub fn prepare(&self, builder: ChannelBuilder<'static>) -> Result<PreparedAsyncChannel> {
        PreparedAsyncChannel::new(builder, &self.registry)
    }

    /// Polls, without waiting, and wakes the tasks whose operations have ended. Returns the number of
    /// channels that had something, or were dropped and are ended now: if it is not 0, there may be more.
    ///
    /// One thread at a time should call it. If several do, [`shutdown`](crate::AsyncChannel::shutdown) may miss a message
    /// that another one has just polled.
    ///
    /// # Errors
    ///
    ///  - Those of [`CompletionQueue::poll`](crate::CompletionQueue::poll).
    ///  - `EIO`, `ENODEV`: the device is gone. If turns find nothing, every 64th of them looks at the clock, and about once
    ///    a second one asks the kernel.
    pub fn turn(&self) -> Result<usize> {
        let ended = self.registry.end_closing(CHANNELS_PER_TURN);
        let mut served = 0;
        let mut polled = self.registry.queue.polled();
        while served < CHANNELS_PER_TURN {
            match self.registry.queue.poll_into(&mut polled)? {
                Found::Nothing => break,
                Found::Ready(token) => {
                    self.registry.serve(token);
                    served += 1;
                }
                Found::Completions => {
                    while let Some((token, completions)) = polled.next() {
                        self.registry.serve_polled(token, completions);
                        served += 1;
                    }
                    polled.done();
                    // Otherwise the queue was empty after that poll: now the tasks run.
                    if !polled.is_full() {
                        break;
                    }
                }
            }
        }
        self.registry.serve_waiting();
        if served + ended == 0 {
            self.count_idle_turn()?;
        }
        Ok(served + ended)
    }

    /// A device that was pulled out completes nothing any more: from time to time, a turn that found nothing asks for it.
    #[inline]
    fn count_idle_turn(&self) -> Result<()> {
        // Turns of several threads may be counted as one.
        let idle = self.idle_turns.load(Ordering::Relaxed);
        self.idle_turns.store(idle.wrapping_add(1), Ordering::Relaxed);
        if idle.is_multiple_of(TURNS_PER_CLOCK_READING) {
            self.check_device_if_due()
        } else {
            Ok(())
        }
    }

    #[cold]
    #[inline(never)]
    fn check_device_if_due(&self) -> Result<()> {
        let now = Instant::now();
        {
            let mut checked = self.device_checked.lock().unwrap_or_else(PoisonError::into_inner);
            let last = *checked.get_or_insert(now);
            if now.saturating_duration_since(last) < DEVICE_CHECK_PERIOD {
                return Ok(());
            }
            *checked = Some(now);
        }
        self.registry.queue.check_device()
    }

    /// `ibv_req_notify_cq`: from now on, the next completion makes the descriptor readable. Call
    /// [`turn`](Self::turn) between this and sleeping.
    ///
    /// # Errors
    ///
    ///  - `EIO`: the device is gone.
    #[doc(alias = "ibv_req_notify_cq")]
    pub fn arm(&self) -> Result<()> {
        self.registry.queue.arm()
    }

    /// Ends all operations of all channels, because polling or sleeping has failed, or the program wants to
    /// stop. The channels cannot be used after that; their futures return `error`. A task in
    /// [`run`](Self::run) ends.
    pub fn stop(&self, error: TransportError) {
        self.registry.stop(error).resume();
    }

    /// Runs the reactor: polls, spins for the [set number of turns](Self::spin), then arms the queue and
    /// sleeps. It returns when the reactor is [stopped](Self::stop), or after an error, which ends all
    /// operations of all channels.
    ///
    /// `poll_readable` waits for the descriptor ([`AsFd`]) as the runtime does it: it returns
    /// [`Poll::Ready`] if the descriptor may have become readable, or has got an error, since the last call, and otherwise
    /// has the task woken then. The descriptor has an error when the device is pulled out; the reactor then ends with
    /// `EIO`.
    ///
    /// Run it in one task at a time. If that task is dropped, the channels' futures wait until it is run
    /// again.
    ///
    /// # Errors
    ///
    /// Those of [`turn`](Self::turn), [`arm`](Self::arm) and `poll_readable`.
    pub fn run<F>(&self, poll_readable: F) -> ReactorRun<'_, F>
    where
        F: FnMut(&mut TaskContext<'_>) -> Poll<io::Result<()>>,
    {
        ReactorRun::new(self, poll_readable)
    }
}

impl AsFd for Reactor {
    /// The file that is readable when [`turn`](Reactor::turn) has something to do. Only wait for it.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.registry.alarms.ready()
    }
}

impl AsRawFd for Reactor {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

impl Drop for Reactor {
    fn drop(&mut self) {
        self.registry.stop(TransportError::Stopped).forget();
    }
}

impl fmt::Debug for Reactor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reactor").field("registry", &self.registry).finish_non_exhaustive()
    }
}
