use std::ffi::c_int;
#[cfg(feature = "async")]
use std::os::fd::AsFd;
#[cfg(feature = "tokio")]
use std::os::fd::AsRawFd;
#[cfg(feature = "channel")]
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::Instant;

use super::completion_channel::{CompletionChannel, WaitChannel};
use super::extended_completion::Extended;
use super::waiters::Waiters;
use super::work_completion::WorkCompletion;
#[cfg(feature = "tokio")]
use crate::base::hooks::hooks;
use crate::base::{Error, Handle, Leak, Parent, Result, debug, ffi, object, resource};
use crate::verbs::device::{Context, ContextRef};
use crate::verbs::domain::DomainRef;

object!(ibv_cq, ibv_destroy_cq, event_acks);

/// What is made from a completion queue borrows or shares it.
pub(crate) type QueueRef<'ctx> = Parent<'ctx, CompletionQueue<'ctx>>;

/// `struct ibv_cq`: a queue to which the device adds the completions of work requests.
///
/// It can serve the send and receive queues of many queue pairs, and needs room for all completions that are not polled
/// yet. A device that finds it full drops completions and raises
/// [`CompletionQueueError`](crate::device::AsyncEventKind::CompletionQueueError).
///
/// | get completions by | |
/// |---|---|
/// | polling | [`poll`](Self::poll) |
/// | sleeping | [`wait`](Self::wait), with a [channel of its own](crate::CompletionQueueBuilder::own_channel) |
/// | an event loop, or one thread for many queues | [`poll_or_arm`](Self::poll_or_arm), with a [`CompletionChannel`] |
/// | reading only some fields, or timestamps | [`ExtendedPoller`](crate::completion::ExtendedPoller), on an [extended](crate::CompletionQueueBuilder::extended) queue |
pub struct CompletionQueue<'ctx> {
    pub(super) raw: Handle<ffi::ibv_cq>,
    pub(super) notifier: Notifier<'ctx>,
    pub(super) solicited_only: bool,
    pub(super) extended: Option<Extended>,
    pub(super) domain: Option<DomainRef<'ctx>>,
    pub(super) context: ContextRef<'ctx>,
}

resource! {
    /// `ibv_destroy_cq`: destroys the queue, and reports errors, which dropping cannot.
    ///
    /// # Errors
    ///
    /// The queue is then [leaked](crate::_guide::verbs#when-a-resource-cannot-be-destroyed).
    ///
    ///  - `EBUSY`: a queue pair that uses it still exists, because it was leaked or could not be destroyed.
    #[doc(alias = "ibv_destroy_cq")]
    CompletionQueue<'ctx>: raw of ibv_cq, notifier, domain, context
}

pub(super) enum Notifier<'ctx> {
    None,
    Own(WaitChannel<'ctx>),
    Shared(Parent<'ctx, CompletionChannel<'ctx>>),
}

impl<'ctx> Notifier<'ctx> {
    pub(super) fn channel(&self) -> Option<&CompletionChannel<'ctx>> {
        match self {
            Self::None => None,
            Self::Own(own) => Some(own.channel()),
            Self::Shared(channel) => Some(channel),
        }
    }
}

impl Leak for Notifier<'_> {
    fn leak(&self) {
        if let Some(channel) = self.channel() {
            channel.leak();
        }
    }
}

impl<'ctx> CompletionQueue<'ctx> {
    /// `ibv_create_cq`: creates a queue with room for at least `entries` completions, for polling.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: `entries` is 0 or more than
    ///    [`DeviceAttributes::max_cqe`](crate::device::DeviceAttributes::max_cqe).
    ///  - `ENOMEM`: the device or the machine has run out of memory or completion queues, or `RLIMIT_MEMLOCK` is too
    ///    low.
    #[doc(alias = "ibv_create_cq")]
    pub fn new(context: impl Into<ContextRef<'ctx>>, entries: u32) -> Result<Self> {
        Self::builder(context, entries).build()
    }

    /// Takes over a queue created elsewhere, such as by a C library. It can be polled, but not waited for.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the pointer is null.
    ///
    /// # Safety
    ///
    /// `raw` is null or a live queue of `context`. Nothing else destroys it: dropping the `CompletionQueue` does, and
    /// waits until all its events that were read are acknowledged. If it is single-threaded, the conditions of
    /// [`CompletionQueueBuilder::single_threaded`](crate::CompletionQueueBuilder::single_threaded) hold.
    pub unsafe fn from_raw(
        raw: *mut ffi::ibv_cq,
        context: impl Into<ContextRef<'ctx>>,
    ) -> Result<Self> {
        const VERB: &str = "ibv_create_cq";
        Error::invalid_if(raw.is_null(), VERB, "the completion queue is null")?;
        // SAFETY: the caller hands over a live queue.
        let raw = unsafe { Handle::new(VERB, raw) }?;
        let (notifier, context) = (Notifier::None, context.into());
        Ok(Self { raw, notifier, solicited_only: false, extended: None, domain: None, context })
    }

    /// `ibv_poll_cq`: takes and returns the oldest completions that fit into `completions`. Never blocks.
    ///
    /// Pass the same slice each time: this allocates nothing and clears nothing. If the result is shorter than
    /// `completions`, the queue is empty.
    ///
    /// # Errors
    ///
    /// The provider's errno value: the queue is broken. This completes no request: the buffers still belong to the
    /// device.
    #[doc(alias = "ibv_poll_cq")]
    #[inline]
    pub fn poll<'c>(&self, completions: &'c mut [WorkCompletion]) -> Result<&'c [WorkCompletion]> {
        let room = c_int::try_from(completions.len()).unwrap_or(c_int::MAX);
        // SAFETY: the queue is live, and `completions` has room for that many.
        let found =
            unsafe { ffi::ibv_poll_cq(self.as_raw(), room, completions.as_mut_ptr().cast()) };
        // One comparison tells a number of completions from every other value.
        if (found as u32).wrapping_sub(1) < room as u32 {
            // SAFETY: `found` is at most the length of the slice.
            Ok(unsafe { completions.get_unchecked(..found as usize) })
        } else if found == 0 {
            Ok(&completions[..0])
        } else {
            // A provider that claims more than there was room for is broken.
            let found = if found > 0 { -libc::EIO } else { found };
            Err(ffi::failed("ibv_poll_cq", found))
        }
    }

    pub(crate) fn own_channel(&self) -> Result<&WaitChannel<'ctx>> {
        match &self.notifier {
            Notifier::Own(channel) => Ok(channel),
            _ => {
                let reason = "sleeping needs a completion queue that was built with \
                              CompletionQueueBuilder::own_channel";
                Err(Error::invalid("ibv_get_cq_event", reason))
            }
        }
    }

    pub(crate) fn is_solicited_only(&self) -> bool {
        self.solicited_only
    }

    /// The number of completions it has room for: at least the number requested.
    pub fn capacity(&self) -> u32 {
        // SAFETY: the queue is live. The load is atomic because another thread may resize it.
        let entries = unsafe { AtomicI32::from_ptr(&raw mut (*self.as_raw()).cqe) };
        u32::try_from(entries.load(Ordering::Relaxed)).unwrap_or(0)
    }

    /// The number that names it in events: see [`CompletionQueueBuilder::token`](crate::CompletionQueueBuilder::token).
    pub fn token(&self) -> usize {
        // SAFETY: the queue is live, and the token never changes.
        unsafe { (*self.as_raw()).cq_context as usize }
    }

    /// The shared channel on which it raises its events, if any.
    pub fn channel(&self) -> Option<&CompletionChannel<'ctx>> {
        match &self.notifier {
            Notifier::Shared(channel) => Some(channel),
            _ => None,
        }
    }

    pub(super) fn extended(&self) -> Option<&Extended> {
        self.extended.as_ref()
    }

    /// The C object of an extended queue, valid while the queue is.
    ///
    /// Polling it is unsound while an [`ExtendedPoller`](crate::completion::ExtendedPoller) exists.
    #[inline]
    pub fn as_raw_extended(&self) -> Option<NonNull<ffi::ibv_cq_ex>> {
        self.extended.as_ref()?;
        NonNull::new(self.as_raw().cast())
    }

    /// The context it was created on.
    pub fn context(&self) -> &Context<'ctx> {
        &self.context
    }
}

impl Context<'_> {
    /// `ibv_create_cq`: [`CompletionQueue::new`], which borrows this context.
    ///
    /// For a queue that leaves the function, pass `new` the context by value or in an `Arc`.
    ///
    /// # Errors
    ///
    /// Those of [`CompletionQueue::new`].
    #[doc(alias = "ibv_create_cq")]
    pub fn create_cq(&self, entries: u32) -> Result<CompletionQueue<'_>> {
        CompletionQueue::new(self, entries)
    }
}

debug! { CompletionQueue<'_>, self, device: self.context.name(), capacity: self.capacity(), .. }

impl CompletionQueue<'_> {
    /// `ibv_poll_cq`, for a queue with a [channel of its own](crate::CompletionQueueBuilder::own_channel): sleeps until
    /// there is a completion, then [polls](Self::poll).
    ///
    /// It polls again after arming, so it misses no completion. Any number of threads can wait; an event wakes all of
    /// them, and those that find nothing sleep again. Signals do not end the wait.
    ///
    /// # Errors
    ///
    /// Those of [`sleep_until`](Self::sleep_until) and [`poll`](Self::poll), and `EINVAL`: `completions` is empty.
    #[doc(alias = "ibv_req_notify_cq")]
    #[doc(alias = "ibv_get_cq_event")]
    pub fn wait<'c>(&self, completions: &'c mut [WorkCompletion]) -> Result<&'c [WorkCompletion]> {
        self.wait_with(completions, None)
    }

    /// [`wait`](Self::wait) until `deadline`.
    ///
    /// # Errors
    ///
    /// Those of [`wait`](Self::wait), and `ETIMEDOUT`: there was no completion before the deadline.
    pub fn wait_until<'c>(
        &self,
        completions: &'c mut [WorkCompletion],
        deadline: Instant,
    ) -> Result<&'c [WorkCompletion]> {
        self.wait_with(completions, Some(deadline))
    }

    fn wait_with<'c>(
        &self,
        completions: &'c mut [WorkCompletion],
        deadline: Option<Instant>,
    ) -> Result<&'c [WorkCompletion]> {
        let reason = "there is no room for a completion";
        Error::invalid_if(completions.is_empty(), "ibv_poll_cq", reason)?;
        let found = self.sleep_until(deadline, || {
            Ok(Some(self.poll(completions)?.len()).filter(|&found| found > 0))
        })?;
        Ok(&completions[..found])
    }

    /// Returns what `poll` finds. While it finds nothing, sleeps until the queue may have completions, and polls again.
    ///
    /// This is [`wait_until`](Self::wait_until) for a program with its own way of polling. `poll` runs without a lock.
    ///
    /// ```no_run
    /// # // waits for a completion
    /// # fn wait(queue: &ibverbs::CompletionQueue<'_>, deadline: std::time::Instant) -> ibverbs::Result<()> {
    /// let mut completions = [ibverbs::WorkCompletion::default(); 64];
    /// let failed = queue.sleep_until(Some(deadline), || {
    ///     let polled = queue.poll(&mut completions)?;
    ///     Ok(polled.iter().find_map(|completion| completion.result().err()))
    /// })?;
    /// println!("the first request that has failed: {failed}");
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// Those of `poll`, and:
    ///
    ///  - `ETIMEDOUT`: `poll` found nothing before the deadline.
    ///  - `EINVAL`: the queue has no channel of its own.
    ///  - `EOPNOTSUPP`: the device cannot arm a queue for solicited completions only.
    ///  - `EIO`: the device is gone.
    pub fn sleep_until<R>(
        &self,
        deadline: Option<Instant>,
        poll: impl FnMut() -> Result<Option<R>>,
    ) -> Result<R> {
        self.sleep_until_found(deadline, poll, || false)
    }

    /// For a `poll` that also finds what raises no event. Once there is some, `is_found` returns true, and then
    /// [`Waiters::wake_all`] must be called.
    pub(crate) fn sleep_until_found<R>(
        &self,
        deadline: Option<Instant>,
        poll: impl FnMut() -> Result<Option<R>>,
        is_found: impl Fn() -> bool,
    ) -> Result<R> {
        let channel = self.own_channel()?;
        // SAFETY: the channel is this queue's, and the queue is live.
        unsafe { channel.sleep_until(self.as_raw(), deadline, poll, is_found, || self.arm()) }
    }

    /// If the next poll finds nothing, [`sleep`](Self::sleep) with the returned value misses no completion.
    pub(crate) fn arm_own(&self) -> Result<u64> {
        self.own_channel()?.arm(|| self.arm())
    }

    /// First reads the event of the last arming. The caller sleeps until its own channel is readable.
    pub(crate) fn rearm_own(&self) -> Result<()> {
        // SAFETY: the channel is this queue's, and the queue is live.
        unsafe { self.own_channel()?.rearm(self.as_raw(), || self.arm()) }
    }

    /// A reactor waits for these, and calls [`rearm_own`](Self::rearm_own) before it sleeps.
    #[cfg(feature = "async")]
    pub(crate) fn files(&self) -> Result<[Option<BorrowedFd<'_>>; 3]> {
        let channel = self.own_channel()?;
        // SAFETY: the channel is this queue's, and the queue is live.
        let attended = unsafe { channel.attend(self.as_raw()) };
        // Miri has no epoll instance inside of another.
        let peers = if cfg!(miri) { None } else { Some(channel.peers()?) };
        Ok([Some(channel.channel().as_fd()), attended, peers])
    }

    /// An epoll instance with the [`files`](Self::files) is to be in another one, which the provider's file prevents.
    #[cfg(feature = "tokio")]
    pub(crate) fn detach(&self, any: BorrowedFd<'_>) {
        // SAFETY: the queue is live.
        hooks().inspect(|hooks| unsafe { (hooks.detach)(self.as_raw(), any.as_raw_fd()) });
    }

    /// [`files`](Self::files) as one.
    #[cfg(feature = "channel")]
    pub(crate) fn ready_file(&self) -> Result<BorrowedFd<'_>> {
        // SAFETY: the channel is this queue's, and the queue is live.
        Ok(unsafe { self.own_channel()?.ready(self.as_raw()) })
    }

    /// Sleeps until an event after [`arm_own`](Self::arm_own), or until `cancelled` returns true. The thread that
    /// cancels then calls [`Waiters::wake_all`].
    pub(crate) fn sleep(
        &self,
        seen: u64,
        deadline: Option<Instant>,
        cancelled: impl Fn() -> bool,
    ) -> Result<()> {
        // SAFETY: the channel is this queue's, and the queue is live.
        unsafe { self.own_channel()?.wait(self.as_raw(), seen, deadline, cancelled) }
    }

    /// Asks the kernel whether it still has the device.
    ///
    /// # Errors
    ///
    ///  - `EIO`, `ENODEV`: the device is gone.
    pub(crate) fn check_device(&self) -> Result<()> {
        match self.context().query_device() {
            Err(error) if matches!(error.errno(), libc::EIO | libc::ENODEV) => Err(error),
            _ => Ok(()),
        }
    }

    /// Threads that go to sleep after this call can be woken.
    pub(crate) fn wakeable(&self) -> Result<Arc<Waiters>> {
        self.own_channel()?.wakeable()
    }

    /// `ibv_poll_cq`, then `ibv_req_notify_cq`: [polls](Self::poll); if there is nothing, arms the queue and polls
    /// again.
    ///
    /// If it returns an empty slice, the next completion raises an event on the queue's channel. An event loop calls
    /// this until then; see [`CompletionChannel`](crate::CompletionChannel).
    ///
    /// # Errors
    ///
    /// Those of [`poll`](Self::poll) and [`arm`](Self::arm), and `EINVAL`: `completions` is empty.
    pub fn poll_or_arm<'c>(
        &self,
        completions: &'c mut [WorkCompletion],
    ) -> Result<&'c [WorkCompletion]> {
        let reason = "there is no room for a completion";
        Error::invalid_if(completions.is_empty(), "ibv_poll_cq", reason)?;
        let found = self.poll(completions)?.len();
        if found > 0 {
            return Ok(&completions[..found]);
        }
        self.arm()?;
        self.poll(completions)
    }

    /// `ibv_req_notify_cq`: arms the queue, which then raises one event for the next completion, or the next solicited
    /// one ([`solicited_only`](crate::CompletionQueueBuilder::solicited_only)).
    ///
    /// Completions already in the queue raise no event: poll after arming, before you sleep, as
    /// [`poll_or_arm`](Self::poll_or_arm) does.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the queue has no channel.
    ///  - `EOPNOTSUPP`: the device cannot arm a queue for solicited completions only.
    #[doc(alias = "ibv_req_notify_cq")]
    #[inline]
    pub fn arm(&self) -> Result<()> {
        const VERB: &str = "ibv_req_notify_cq";
        // SAFETY: the queue is live.
        if unsafe { (*self.as_raw()).channel.is_null() } {
            return Err(Error::invalid(VERB, "the completion queue was made without a channel"));
        }
        // SAFETY: the queue is live.
        let returned =
            unsafe { ffi::ibv_req_notify_cq(self.as_raw(), self.is_solicited_only().into()) };
        ffi::status(VERB, returned)
    }
}
