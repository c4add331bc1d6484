//! Drives the futures of a loop's channels.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

#[cfg(feature = "mlx5")]
use super::AsyncChannel;
use super::locked_loop::{Guard, Lock, Locked, Share, State, put_back, stop};
use super::receive::SharedReceives;
use super::request::PreparedAsyncChannel;
use super::timer::Timer;
use crate::base::{Error, Result, debug, panics::Panics};
use crate::channel::parts::{DEVICE_CHECK_PERIOD, Queue};
use crate::channel::{ChannelBuilder, TransportError};
use crate::serve::event_loop::{Loop, Woken};
use crate::serve::pool::PooledBuffer;
use crate::verbs::completion::CompletionQueue;
use crate::verbs::device::ContextRef;
use crate::verbs::domain::DomainRef;
#[cfg(feature = "mlx5")]
use crate::verbs::queue_pair::QueuePairEndpoint;
use crate::verbs::queue_pair::SharedReceiveQueue;

/// Few, because a program may sleep between turns.
const TURNS_PER_CLOCK_READING: u32 = 64;

/// Drives the [`AsyncChannel`](crate::AsyncChannel)s of one completion queue, within any runtime or event loop.
///
/// `S` says how tasks share it, and of what type their buffers are: [`Locked`] on any threads (the default, with
/// [`PooledBuffer`]s), or [`Local`](crate::future::Local) on one thread, without a lock.
///
/// With feature `tokio`, call `Reactor::spawn_on_tokio`. On another runtime, [`run`](Self::run) takes its way to wait
/// for a descriptor. A hand-written loop calls [`turn`](Self::turn) and [`arm`](Self::arm):
///
/// ```
/// # let rxe0 = ibverbs_software::Device::builder().name("rxe0").build().unwrap();
/// # rxe0.register();
/// # use std::sync::Arc;
/// use ibverbs::{AsyncChannel, BufferPool, OperationError, PooledBuffer, Reactor};
///
/// /// Answers each message with itself.
/// async fn serve(
///     channel: AsyncChannel,
///     mut buffer: PooledBuffer,
/// ) -> Result<(), OperationError<PooledBuffer>> {
///     loop {
///         let (message, _) = channel.receive(buffer).await?;
///         (buffer, _) = channel.send(message).await?;
///     }
/// }
///
/// # fn sleep_until_readable(_: &Reactor) {}
/// # fn run_tasks() {}
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let context = Arc::new(ibverbs::open("rxe0")?);
/// let reactor = Reactor::new(&context, 1024)?;
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
/// One wake-up serves all completions that are there. Each wakes only the task of its own operation. Without turns no
/// future ends; a debug build says so on standard error when one has waited for a second.
///
/// Dropping the reactor ends all operations of its channels with [`ReactorGone`](TransportError::ReactorGone).
pub struct Reactor<S: Share = Locked<PooledBuffer>> {
    pub(super) share: S,
    pub(super) queue: Arc<CompletionQueue<'static>>,
    timer: Arc<Timer>,
    /// `None`: it adapts.
    pub(super) spin: Option<u32>,
    idle_turns: AtomicU32,
}

impl Reactor {
    /// `ibv_create_comp_channel`, `ibv_create_cq`: a reactor whose channels together have up to `entries` operations in
    /// flight: see [`Loop::capacity`]. Its tasks may be on any threads, with [`PooledBuffer`]s.
    ///
    /// # Errors
    ///
    ///  - Those of [`Loop::new`].
    ///  - `EMFILE`, `ENFILE`: the process, or the machine, has too many files open. A reactor has four.
    #[doc(alias = "ibv_create_cq")]
    pub fn new(context: impl Into<ContextRef<'static>>, entries: u32) -> Result<Self> {
        Self::with_share(context, entries)
    }
}

impl<S: Share> Reactor<S> {
    /// As [`new`](Reactor::new), for tasks of one thread, or for other buffers:
    ///
    /// ```
    /// # let rxe0 = ibverbs_software::Device::builder().name("rxe0").build().unwrap();
    /// # rxe0.register();
    /// # fn main() -> ibverbs::Result<()> {
    /// use std::sync::Arc;
    /// use ibverbs::channel::AnyBuffer;
    /// use ibverbs::future::Local;
    /// use ibverbs::Reactor;
    ///
    /// let context = Arc::new(ibverbs::open("rxe0")?);
    /// let reactor = Reactor::<Local<AnyBuffer>>::with_share(&context, 1024)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`new`](Reactor::new).
    #[doc(alias = "ibv_create_cq")]
    pub fn with_share(context: impl Into<ContextRef<'static>>, entries: u32) -> Result<Self> {
        let core = Loop::new(context, entries)?.of_tasks();
        let queue = core.queue().clone();
        let timer = Arc::new(Timer::new(queue.files()?)?);
        let share = S::new(State::new(core, timer.clone()));
        Ok(Self { share, queue, timer, spin: None, idle_turns: AtomicU32::new(0) })
    }

    /// Sets how many turns find nothing before [`run`](Self::run) sleeps. Other tasks of the runtime run between turns.
    /// More means lower latency and a busy processor.
    ///
    /// By default it adapts: up to 64 turns, some 20 µs, after something has ended, as long as they find the next
    /// completion; half as many each time they do not, down to none, until a later try helps. If another program takes
    /// the processor meanwhile, none for 65,536 sleeps. An idle reactor sleeps.
    #[must_use]
    pub fn spin(mut self, turns: u32) -> Self {
        self.spin = Some(turns);
        self
    }

    /// See [`Loop::capacity`].
    pub fn capacity(&self) -> (u32, u32) {
        self.share.lock().core.capacity()
    }

    /// `ibv_create_qp`: creates the queue pair of an [`AsyncChannel`](crate::AsyncChannel) on the reactor's completion
    /// queue.
    ///
    /// # Errors
    ///
    /// Those of [`ChannelBuilder::build`], and
    ///
    ///  - `EINVAL`: the reactor has too little [room](Self::capacity) left, or the builder shares receives of a loop.
    #[doc(alias = "ibv_create_qp")]
    pub fn prepare(&self, builder: ChannelBuilder<'static>) -> Result<PreparedAsyncChannel<S>> {
        self.prepare_with(builder, None)
    }

    /// As [`prepare`](Self::prepare), for a channel that takes all its receives from `receives`.
    ///
    /// # Errors
    ///
    /// Those of [`prepare`](Self::prepare), and
    ///
    ///  - `EINVAL`: the receives are of another reactor.
    #[doc(alias = "ibv_create_qp")]
    pub fn prepare_sharing(
        &self,
        builder: ChannelBuilder<'static>,
        receives: &SharedReceives<S>,
    ) -> Result<PreparedAsyncChannel<S>> {
        let known = self.share.lock().core.shares(receives.id(), receives.queue());
        Error::invalid_if(!known, "ibv_create_qp", "the shared receives are of another reactor")?;
        self.prepare_with(builder, Some(receives.queue().clone()))
    }

    /// `mlx5dv_create_qp`: creates a DC target that takes the receives, as a channel that only
    /// [receives](AsyncChannel::next_message), and the address that initiators need. See
    /// [`ChannelBuilder::build_dc_target`].
    ///
    /// # Errors
    ///
    /// Those of [`ChannelBuilder::build_dc_target`] and [`prepare_sharing`](Self::prepare_sharing).
    #[cfg(feature = "mlx5")]
    #[doc(alias = "mlx5dv_create_qp")]
    pub fn dc_target(
        &self,
        builder: ChannelBuilder<'static>,
        receives: &SharedReceives<S>,
        access_key: u64,
    ) -> Result<(AsyncChannel<S>, QueuePairEndpoint)> {
        let known = self.share.lock().core.shares(receives.id(), receives.queue());
        Error::invalid_if(!known, "ibv_create_qp", "the shared receives are of another reactor")?;
        let builder = builder.of_loop(&self.queue, Some(receives.queue().clone()));
        let channel = builder.build_dc_target(access_key)?;
        let (share, number, endpoint) = (self.share.clone(), channel.number(), channel.endpoint());
        let mut guard = self.share.lock();
        let added =
            guard.core.add(channel).map(|id| (AsyncChannel { share, id, number }, endpoint));
        drop(guard);
        // An error destroys the queue pair, outside the lock.
        added.map_err(|failed| failed.error)
    }

    fn prepare_with(
        &self,
        builder: ChannelBuilder<'static>,
        shared: Option<Arc<SharedReceiveQueue<'static>>>,
    ) -> Result<PreparedAsyncChannel<S>> {
        let reason = "the builder is of Loop::create_sharing_channel, whose receives are of that loop: take \
                      Channel::builder, and Reactor::prepare_sharing for receives of the reactor";
        Error::invalid_if(builder.shares_receives(), "ibv_create_qp", reason)?;
        PreparedAsyncChannel::new(&self.share, builder.of_loop(&self.queue, shared))
    }

    /// `ibv_create_srq`: creates receives that channels of the reactor [share](Self::prepare_sharing). Up to `capacity`
    /// are posted at a time, which takes that much [room](Self::capacity).
    ///
    /// # Errors
    ///
    /// Those of [`Loop::add_shared_receives`].
    #[doc(alias = "ibv_create_srq")]
    pub fn add_shared_receives(
        &self,
        domain: impl Into<DomainRef<'static>>,
        capacity: u32,
    ) -> Result<SharedReceives<S>> {
        SharedReceives::new(&self.share, &self.queue, domain.into(), capacity)
    }

    /// `ibv_poll_cq`: polls once without waiting, for up to sixteen completions, and wakes the tasks whose operations
    /// have ended.
    ///
    /// Returns the number of completions, including those that the device made up, which end nothing. If it is not 0,
    /// there may be more.
    ///
    /// # Errors
    ///
    ///  - Polling failed, which ends nothing.
    ///  - `EIO`, `ENODEV`: the device is gone. Every 64th turn that finds nothing looks at the clock, and about once a
    ///    second one asks the kernel.
    #[doc(alias = "ibv_poll_cq")]
    #[inline]
    pub fn turn(&self) -> Result<usize> {
        // Dropped after the lock.
        let mut woken = Woken::new();
        let mut state = self.share.lock_briefly();
        let found = match state.core.begin_turn() {
            Ok(found) => found,
            Err(error) => return turn_failed(state.until_done(&self.share), error),
        };
        let is_quiet = found == 0 && state.core.is_quiet();
        state.stall_warning.turned(!is_quiet);
        let has_clock = state.core.lacks_credit() || state.alarm.is_some();
        if is_quiet && !has_clock {
            drop(state);
            return self.count_idle_turn();
        }
        state.core.end_turn(found, &mut woken);
        let must_check = has_clock && state.look_at_clock();
        if state.core.deferred().is_empty() {
            drop(state);
        } else {
            drop(state.until_done(&self.share));
        }
        woken.wake();
        if must_check {
            self.check_connections();
        }
        if found == 0 { self.count_idle_turn() } else { Ok(found) }
    }

    /// A removed device completes nothing, nor does a peer that is gone, so some idle turns ask the kernel. Returns
    /// whether a peer is gone.
    #[inline]
    fn count_idle_turn(&self) -> Result<usize> {
        // Turns on two threads may count as one.
        let idle = self.idle_turns.load(Ordering::Relaxed);
        self.idle_turns.store(idle.wrapping_add(1), Ordering::Relaxed);
        if idle.is_multiple_of(TURNS_PER_CLOCK_READING) { self.check_device() } else { Ok(0) }
    }

    #[cold]
    #[inline(never)]
    fn look_at_peers(&self, is_due: bool) -> usize {
        self.share.lock().core.look_at_peers(is_due).into()
    }

    #[cold]
    #[inline(never)]
    fn check_device(&self) -> Result<usize> {
        if self.queue.own_channel()?.must_look() {
            return Ok(self.look_at_peers(false));
        }
        let now = Instant::now();
        let mut guard = self.share.lock();
        let last = *guard.device_checked.get_or_insert(now);
        if now.saturating_duration_since(last) < DEVICE_CHECK_PERIOD {
            return Ok(0);
        }
        guard.device_checked = Some(now);
        drop(guard);
        self.queue.check_device()?;
        Ok(self.look_at_peers(true))
    }

    #[cold]
    fn check_connections(&self) {
        let now = Instant::now();
        let (mut panics, mut index) = (Panics::default(), 0);
        loop {
            let mut guard = self.share.lock();
            let Some(channel) = guard.core.next_busy(index) else { break };
            index = channel.index() + 1;
            let out = guard.core.borrow_out(channel);
            // The tasks are woken once it is back, as some use it.
            guard.unlock();
            // The thread that has taken it out checks it.
            let Some(out) = out else { continue };
            let checked = out.check(now);
            panics.catch(|| put_back(&self.share, out, None));
            if let Err(error) = checked {
                panics.catch(|| stop(&self.share, channel, error.into()));
            }
        }
        panics.resume();
    }

    /// `ibv_req_notify_cq`: the next completion makes the descriptor readable. Call [`turn`](Self::turn) between this
    /// and sleeping.
    ///
    /// # Errors
    ///
    ///  - `EIO`: the device is gone.
    #[doc(alias = "ibv_req_notify_cq")]
    pub fn arm(&self) -> Result<()> {
        if cfg!(debug_assertions) {
            self.share.lock().stall_warning.sleeps();
        }
        self.queue.rearm_own()?;
        if self.queue.own_channel()?.must_look() {
            // The next idle turn looks.
            self.idle_turns.store(0, Ordering::Relaxed);
        }
        Ok(())
    }

    /// `ibv_modify_qp`: ends all operations of all channels, because polling or sleeping failed, or the program wants
    /// to stop.
    ///
    /// Nothing can be posted afterwards. Futures return `error`, or how their operation ended. A task in
    /// [`run`](Self::run) ends.
    #[doc(alias = "ibv_modify_qp")]
    pub fn stop(&self, error: TransportError) {
        self.stop_all(error).resume();
    }

    /// Returns the panics of wakers.
    fn stop_all(&self, error: TransportError) -> Panics {
        let mut panics = Panics::default();
        let mut guard = self.share.lock();
        guard.is_stopped = true;
        let runner = guard.runner.take();
        guard.core.stop_adding(error);
        let mut next = guard.core.next_channel(0);
        panics.catch(|| drop(guard));
        while let Some(channel) = next {
            panics.catch(|| stop(&self.share, channel, error));
            let guard = self.share.lock();
            next = guard.core.next_channel(channel.index() + 1);
            panics.catch(|| drop(guard));
        }
        panics.catch(|| runner.into_iter().for_each(|runner| runner.wake()));
        panics
    }
}

impl<B> State<B> {
    /// Returns whether to check the connections.
    #[cold]
    fn look_at_clock(&mut self) -> bool {
        let mut must_check = false;
        if let Some(alarm) = self.alarm {
            let now = Instant::now();
            if alarm <= now {
                self.alarm = None;
                self.timer.set(None);
                if let Some(next) = self.next_check.filter(|&next| next <= now) {
                    must_check = true;
                    self.next_check = next.max(now).checked_add(DEVICE_CHECK_PERIOD);
                }
                self.next_check.into_iter().for_each(|next| self.set_alarm(next));
            }
        }
        while let Some(channel) = self.core.next_credited() {
            self.core.wake_line(channel, Queue::Send);
        }
        self.set_credit_alarm();
        must_check
    }

    #[cold]
    pub(super) fn set_credit_alarm(&mut self) {
        if let Some(pause) = self.core.credit_pause() {
            self.set_alarm(Instant::now() + pause);
        }
    }

    /// iWARP connections end without a completion.
    pub(super) fn connected(&mut self) {
        if self.next_check.is_none() && self.core.is_iwarp() {
            let next = Instant::now() + DEVICE_CHECK_PERIOD;
            self.next_check = Some(next);
            self.set_alarm(next);
        }
    }
}

#[cold]
#[inline(never)]
fn turn_failed<S: Share>(guard: Guard<'_, S>, error: TransportError) -> Result<usize> {
    drop(guard);
    match error {
        TransportError::Verbs(error) => Err(error),
        _ => Ok(1),
    }
}

impl<S: Share> AsFd for Reactor<S> {
    /// The file that is readable when [`turn`](Reactor::turn) has something to do. Only wait for it.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.timer.ready()
    }
}

impl<S: Share> AsRawFd for Reactor<S> {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

impl<S: Share> Drop for Reactor<S> {
    fn drop(&mut self) {
        self.stop_all(TransportError::ReactorGone).forget();
    }
}

debug! { impl[S: Share] Reactor<S>, self, queue: self.queue, .. }
