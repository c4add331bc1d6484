//! Completion channels: sleeping until a completion queue raises an event.
//!
//! `ibv_destroy_cq` blocks until every event of the queue that was read is acknowledged. So the call that reads an
//! event acknowledges it, and may follow the event's pointer to the queue until then. The kernel discards a queue's
//! unread events before libibverbs waits, so no event names a destroyed queue.
//!
//! A completion that arrives between an empty poll and the arming raises no event. So a thread polls again after
//! arming.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

use super::waiters::{Read, Waiters};
use super::waker::Waker;
#[cfg(feature = "channel")]
use crate::base::linux;
use crate::base::{
    Error, Handle, Object, Result, debug, event_acks::EventFile, ffi, hooks, object, resource,
};
use crate::verbs::device::{Context, ContextRef, event_file};

object!(ibv_comp_channel, ibv_destroy_comp_channel);

const GET: &str = "ibv_get_cq_event";

/// `struct ibv_comp_channel`: reports which of its completion queues have completions to poll.
///
/// Once armed, a queue made with [`CompletionQueueBuilder::channel`](crate::CompletionQueueBuilder::channel) raises one
/// event with the next completion. Any number of queues can share a channel; an event names its queue by
/// [`token`](CompletionEvent::token).
///
/// A channel serves event loops, and threads that wait for several queues: it is [`AsFd`], readable when there is an
/// event, and blocks only in [`wait`](Self::wait) and [`wait_until`](Self::wait_until). For one queue,
/// [`CompletionQueue::wait`](crate::CompletionQueue::wait) is simpler.
///
/// Each event goes to exactly one waiting thread, already acknowledged (`ibv_ack_cq_events`). A queue can be destroyed
/// at any time, which discards its unread events.
///
/// # With an event loop
///
/// At the start, and whenever the channel is readable, take events until there are none. For each event, call
/// [`poll_or_arm`](crate::CompletionQueue::poll_or_arm) on its queue until that returns an empty slice. This misses no
/// completion, even in an edge-triggered loop (`epoll` with `EPOLLET`, `mio`, `tokio::io::unix::AsyncFd`).
///
/// ```
/// # fn readable(_: &ibverbs::CompletionChannel<'_>) {}
/// use ibverbs::{CompletionChannel, CompletionQueue, WorkCompletion};
///
/// # fn main() -> ibverbs::Result<()> {
/// # let rxe0 = ibverbs_software::Device::builder().name("rxe0").build().unwrap();
/// # rxe0.register();
/// let context = ibverbs::open("rxe0")?;
/// let channel = CompletionChannel::new(&context)?;
/// let queues = (0..4)
///     .map(|token| CompletionQueue::builder(&context, 128).channel(&channel).token(token).build())
///     .collect::<Result<Vec<_>, _>>()?;
///
/// let mut completions = [WorkCompletion::default(); 16];
/// let mut drain = |queue: &CompletionQueue<'_>| loop {
///     match queue.poll_or_arm(&mut completions)? {
///         [] => break Ok::<_, ibverbs::Error>(()),
///         found => found.iter().for_each(|completion| println!("{completion:?}")),
///     }
/// };
/// queues.iter().try_for_each(&mut drain)?;
/// loop {
///     readable(&channel); // the event loop, with channel.as_fd()
///     while let Some(event) = channel.next_event()? {
///         drain(&queues[event.token()])?;
///     }
///     # break;
/// }
/// # Ok(())
/// # }
/// ```
#[doc(alias = "ibv_comp_channel")]
pub struct CompletionChannel<'ctx> {
    raw: Handle<ffi::ibv_comp_channel>,
    events: EventFile,
    context: ContextRef<'ctx>,
}

resource! {
    /// `ibv_destroy_comp_channel`: destroys the channel, and reports errors, which dropping cannot.
    ///
    /// # Errors
    ///
    /// The channel is then [leaked](crate::_guide::verbs#when-a-resource-cannot-be-destroyed).
    ///
    ///  - `EBUSY`: a queue that uses it still exists, because it was leaked or could not be destroyed.
    #[doc(alias = "ibv_destroy_comp_channel")]
    CompletionChannel<'ctx>: raw of ibv_comp_channel, context
}

// Threads may share it: libibverbs guards its counters with the context's lock, and reads the file by one system call.

/// An event of a [`CompletionChannel`], already acknowledged: an armed queue got a completion.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct CompletionEvent {
    token: usize,
}

impl CompletionEvent {
    /// The queue's token, set by [`CompletionQueueBuilder::token`](crate::CompletionQueueBuilder::token).
    pub fn token(&self) -> usize {
        self.token
    }
}

impl<'ctx> CompletionChannel<'ctx> {
    /// `ibv_create_comp_channel`: creates a channel with a non-blocking file.
    ///
    /// # Errors
    ///
    ///  - `EMFILE`, `ENFILE`: the process, or the machine, has too many files open.
    ///  - `ENOMEM`: out of memory.
    #[doc(alias = "ibv_create_comp_channel")]
    pub fn new(context: impl Into<ContextRef<'ctx>>) -> Result<Self> {
        let context = context.into();
        // SAFETY: the context is live; a channel that comes back is ours alone.
        let raw = unsafe {
            let raw = ffi::ibv_create_comp_channel(context.as_raw());
            Handle::new("ibv_create_comp_channel", raw)
        }?;
        Self::nonblocking(raw, context)
    }

    /// Takes over a channel created elsewhere, such as by a C library, and makes its file non-blocking.
    ///
    /// The token in events of a queue that this crate did not make is the queue's `cq_context` pointer as a number.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the pointer is null.
    ///
    /// # Safety
    ///
    /// `raw` is null or a live channel of `context`. Nothing else destroys it: dropping the `CompletionChannel` does,
    /// once no queue uses it any more.
    pub unsafe fn from_raw(
        raw: *mut ffi::ibv_comp_channel,
        context: impl Into<ContextRef<'ctx>>,
    ) -> Result<Self> {
        const VERB: &str = "ibv_create_comp_channel";
        Error::invalid_if(raw.is_null(), VERB, "the channel is null")?;
        // SAFETY: the caller hands over a live channel.
        let raw = unsafe { Handle::new(VERB, raw) }?;
        Self::nonblocking(raw, context.into())
    }

    fn nonblocking(raw: Handle<ffi::ibv_comp_channel>, context: ContextRef<'ctx>) -> Result<Self> {
        let events =
            EventFile::new(context.as_raw(), Some(<ffi::ibv_cq as Object>::DESTROY), false);
        let channel = Self { raw, events, context };
        event_file::set_nonblocking("ibv_create_comp_channel", channel.as_raw_fd())?;
        Ok(channel)
    }

    /// `ibv_get_cq_event`: takes the oldest event, if any, and acknowledges it (`ibv_ack_cq_events`). Never blocks.
    ///
    /// The queue may be empty by then: another thread can arm and poll it before this call takes its event.
    ///
    /// # Errors
    ///
    ///  - `EIO`: the device is gone.
    #[doc(alias = "ibv_get_cq_event")]
    #[doc(alias = "ibv_ack_cq_events")]
    pub fn next_event(&self) -> Result<Option<CompletionEvent>> {
        self.take_event()
    }

    /// Inlined into `wait`: each message costs this.
    #[inline(always)]
    fn take_event(&self) -> Result<Option<CompletionEvent>> {
        let (mut queue, mut queue_context) = (ptr::null_mut(), ptr::null_mut());
        self.events.read(|| {
            let read = event_file::read_event(GET, || {
                // SAFETY: the channel is live, and the two pointers are writable. The queue's destroy verb waits for
                // the acknowledgement, or for the end of `EventFile::read`.
                unsafe { ffi::ibv_get_cq_event(self.as_raw(), &mut queue, &mut queue_context) }
            })?;
            if !read {
                return self.no_event();
            }
            // SAFETY: as above; this is the acknowledgement.
            unsafe { ffi::ibv_ack_cq_events(queue, 1) };
            Ok(Some(CompletionEvent { token: queue_context as usize }))
        })
    }

    /// Says that no event is there now, or that there will be none.
    #[cold]
    fn no_event(&self) -> Result<Option<CompletionEvent>> {
        match hooks::hooks() {
            Some(hooks) if (hooks.is_ended)(self.as_raw_fd()) => Err(Error::new(GET, libc::EIO)),
            _ => Ok(None),
        }
    }

    /// [`next_event`](Self::next_event), sleeping until there is one. Signals do not end the wait.
    ///
    /// # Errors
    ///
    /// Those of [`next_event`](Self::next_event).
    #[inline]
    pub fn wait(&self) -> Result<CompletionEvent> {
        self.wait_with(None)
    }

    /// [`wait`](Self::wait) until `deadline`.
    ///
    /// # Errors
    ///
    /// Those of [`next_event`](Self::next_event), and `ETIMEDOUT`: there was no event before the deadline.
    pub fn wait_until(&self, deadline: Instant) -> Result<CompletionEvent> {
        self.wait_with(Some(deadline))
    }

    #[inline(always)]
    fn wait_with(&self, deadline: Option<Instant>) -> Result<CompletionEvent> {
        match self.take_event()? {
            Some(event) => Ok(event),
            None => self.sleep_until(deadline),
        }
    }

    #[cold]
    fn sleep_until(&self, deadline: Option<Instant>) -> Result<CompletionEvent> {
        event_file::take_before(GET, self.as_raw_fd(), deadline, || self.next_event())
    }

    /// The context it was created on.
    pub fn context(&self) -> &Context<'ctx> {
        &self.context
    }
}

impl AsRawFd for CompletionChannel<'_> {
    fn as_raw_fd(&self) -> RawFd {
        // SAFETY: the channel is live.
        unsafe { (*self.as_raw()).fd }
    }
}

impl AsFd for CompletionChannel<'_> {
    /// The file that is readable when there is an event. Only wait for it: [`next_event`](Self::next_event) alone may
    /// read it.
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: only dropping the channel closes its file, and the result borrows the channel.
        unsafe { BorrowedFd::borrow_raw(self.as_raw_fd()) }
    }
}

debug! { CompletionChannel<'_>, self, device: self.context.name(), fd: self.as_raw_fd(), .. }

impl Context<'_> {
    /// `ibv_create_comp_channel`: [`CompletionChannel::new`], which borrows this context.
    ///
    /// For a channel that leaves the function, pass `new` the context by value or in an `Arc`.
    ///
    /// # Errors
    ///
    /// Those of [`CompletionChannel::new`].
    #[doc(alias = "ibv_create_comp_channel")]
    pub fn create_comp_channel(&self) -> Result<CompletionChannel<'_>> {
        CompletionChannel::new(self)
    }
}

/// # Safety of the methods
///
/// `queue` is live, and the one that the channel serves.
pub(crate) struct WaitChannel<'ctx> {
    channel: CompletionChannel<'ctx>,
    waiters: Arc<Waiters>,
    attended: OnceLock<Option<RawFd>>,
    ready: OnceLock<Option<OwnedFd>>,
    /// An epoll instance with the files that tell that peers of the queue's channels are gone, and whether it has any.
    peers: OnceLock<OwnedFd>,
    is_watching: AtomicBool,
    /// A thread is about to sleep: the next one that finds the queue empty looks at the peers.
    must_look: AtomicBool,
    /// Held while `ready` or `peers` is made: the former has the latter.
    making: Mutex<()>,
}

impl<'ctx> WaitChannel<'ctx> {
    /// `channel` serves no other queue.
    pub(super) fn new(channel: CompletionChannel<'ctx>) -> Self {
        let waiters = Arc::new(Waiters::new(GET));
        let (attended, ready, peers, is_watching) = Default::default();
        let (must_look, making) = Default::default();
        Self { channel, waiters, attended, ready, peers, is_watching, must_look, making }
    }

    pub(super) fn arm(&self, arm: impl FnOnce() -> Result<()>) -> Result<u64> {
        self.waiters.arm(arm).inspect(|_| self.look_at_peers())
    }

    fn look_at_peers(&self) {
        if self.is_watching.load(Ordering::Relaxed) {
            self.must_look.store(true, Ordering::Relaxed);
        }
    }

    pub(super) unsafe fn rearm(
        &self,
        queue: *mut ffi::ibv_cq,
        arm: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let has_event = match (self.attended.get(), hooks::hooks()) {
            // SAFETY: the queue is live, and `attend` has returned a file.
            (Some(Some(_)), Some(hooks)) => unsafe { (hooks.rest)(queue) },
            _ => true,
        };
        self.look_at_peers();
        self.waiters.rearm(|| Ok(has_event && self.channel.next_event()?.is_some()), arm)
    }

    pub(super) unsafe fn sleep_until<R>(
        &self,
        queue: *mut ffi::ibv_cq,
        deadline: Option<Instant>,
        poll: impl FnMut() -> Result<Option<R>>,
        cancelled: impl Fn() -> bool,
        arm: impl Fn() -> Result<()>,
    ) -> Result<R> {
        // SAFETY: the caller vouches for the queue.
        let read = |waker: Option<&Waker>| unsafe { self.read(queue, waker, deadline) };
        let arm = || arm().inspect(|()| self.look_at_peers());
        self.waiters.sleep_until(deadline, poll, cancelled, arm, read)
    }

    pub(super) unsafe fn wait(
        &self,
        queue: *mut ffi::ibv_cq,
        seen: u64,
        deadline: Option<Instant>,
        cancelled: impl Fn() -> bool,
    ) -> Result<()> {
        // SAFETY: the caller vouches for the queue.
        let read = |waker: Option<&Waker>| unsafe { self.read(queue, waker, deadline) };
        self.waiters.wait(seen, deadline, cancelled, read)
    }

    /// Sleeps until it has read an event, or is woken for another reason.
    unsafe fn read(
        &self,
        queue: *mut ffi::ibv_cq,
        waker: Option<&Waker>,
        deadline: Option<Instant>,
    ) -> Result<Read> {
        let (fd, peers) = (self.channel.as_raw_fd(), self.peers.get());
        let all = [peers.map_or(fd, OwnedFd::as_raw_fd), waker.map_or(fd, Waker::fd), fd];
        let files = match (peers, waker) {
            (Some(_), Some(_)) => &all[..],
            (Some(_), None) => &all[..2],
            (None, Some(_)) => &all[1..],
            (None, None) => &all[2..],
        };
        if let Some(hooks) = hooks::hooks() {
            // SAFETY: the caller vouches for the queue.
            if unsafe { (hooks.sleep_for)(queue, files, deadline) } {
                return Ok(Read::Early);
            }
        }
        if files.len() == 1 {
            return self.channel.wait_with(deadline).map(|_| Read::Event);
        }
        let next = || self.channel.next_event();
        Ok(match event_file::take_before_or_woken(GET, files, deadline, next)? {
            Ok(_) => Read::Event,
            // All sleepers look: one of them has the loop.
            Err(0) if peers.is_some() => Read::Early,
            Err(_) => Read::Woken,
        })
    }

    /// A file that the provider asks an event loop to wait for, in addition to the channel's.
    pub(crate) unsafe fn attend(&self, queue: *mut ffi::ibv_cq) -> Option<BorrowedFd<'_>> {
        let attended = self.attended.get_or_init(|| {
            // SAFETY: the caller vouches for the queue.
            hooks::hooks().and_then(|hooks| unsafe { (hooks.attend)(queue) })
        });
        // SAFETY: the provider keeps it open while the queue lives, longer than the borrow of this channel.
        attended.map(|fd| unsafe { BorrowedFd::borrow_raw(fd) })
    }

    /// Readable when the channel, the file of [`attend`](Self::attend), or that of threads that sleep
    /// [elsewhere](Waiters::elsewhere) is.
    pub(crate) unsafe fn ready(&self, queue: *mut ffi::ibv_cq) -> BorrowedFd<'_> {
        let _making = self.ready.get().is_none().then(|| self.making());
        let ready = self.ready.get_or_init(|| {
            // SAFETY: the caller vouches for the queue.
            let attended = unsafe { self.attend(queue) };
            let own = [self.channel.as_fd(), self.waiters.elsewhere().ok()?];
            let peers = self.peers.get().map(OwnedFd::as_fd);
            let files: Vec<_> = own.into_iter().chain(attended).chain(peers).collect();
            // If no descriptor is left, the channel's file must do: its event comes later.
            event_file::any_of(&files).ok()
        });
        ready.as_ref().map_or(self.channel.as_fd(), OwnedFd::as_fd)
    }

    fn making(&self) -> MutexGuard<'_, ()> {
        self.making.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// For files that tell that a peer is gone. A thread that sleeps for the queue wakes when one does, and
    /// [looks](Self::take_look).
    ///
    /// # Errors
    ///
    ///  - `EMFILE`, `ENFILE`: the process, or the machine, has too many files open.
    ///  - `ENOMEM`: out of memory.
    #[cfg(feature = "channel")]
    pub(crate) fn peers(&self) -> Result<BorrowedFd<'_>> {
        if let Some(peers) = self.peers.get() {
            return Ok(peers.as_fd());
        }
        let _making = self.making();
        let first = event_file::any_of(&[])?;
        if let Some(Some(ready)) = self.ready.get() {
            event_file::watch(ready.as_fd(), first.as_fd(), linux::EPOLLIN, 0)?;
        }
        // If another thread has made it meanwhile, this one is closed.
        Ok(self.peers.get_or_init(|| first).as_fd())
    }

    /// A file was added to [`peers`](Self::peers).
    #[cfg(feature = "channel")]
    pub(crate) fn begin_to_watch(&self) {
        self.is_watching.store(true, Ordering::Relaxed);
    }

    /// The files of peers, if it is time to look at them. `is_due`: a poller that never sleeps has polled for long.
    #[cfg(feature = "channel")]
    pub(crate) fn take_look(&self, is_due: bool) -> Option<BorrowedFd<'_>> {
        let peers = self.peers.get().filter(|_| is_due || self.must_look())?;
        self.must_look.store(false, Ordering::Relaxed);
        Some(peers.as_fd())
    }

    #[cfg(feature = "channel")]
    #[inline]
    pub(crate) fn must_look(&self) -> bool {
        self.must_look.load(Ordering::Relaxed)
    }

    pub(super) fn wakeable(&self) -> Result<Arc<Waiters>> {
        self.waiters.make_wakeable()?;
        self.waiters.elsewhere()?;
        Ok(self.waiters.clone())
    }

    pub(crate) fn channel(&self) -> &CompletionChannel<'ctx> {
        &self.channel
    }

    pub(crate) fn waiters(&self) -> &Waiters {
        &self.waiters
    }
}
