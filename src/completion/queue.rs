//! Completion queues.

use std::ffi::c_int;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::{Duration, Instant};

use super::completion_channel::CompletionChannel;
use super::completion_channel::WaitChannel;
use super::extended_poller::Extended;
use super::extended_poller::ExtendedPoller;
use super::queue_builder::CompletionQueueBuilder;
use super::queue_builder::capacity;
use super::waiters::Waiters;
use super::work_completion::WorkCompletion;
use crate::device::{Context, ModerationCapabilities, event_file, quirks};
use crate::error::{Error, Result};
use crate::ffi;
use crate::handle::{Handle, Leak, object, resource};
use crate::parent::Parent;

object!(ibv_cq, ibv_destroy_cq, no_event_is_read);

const RESIZE: &str = "ibv_resize_cq";

/// `struct ibv_cq`: a queue to which the device adds the completions of work requests.
///
/// One completion queue can serve the send and the receive queues of many queue pairs. It must have
/// room for all completions that are not polled yet: a device that finds it full drops completions and
/// raises [`CompletionQueueError`](crate::AsyncEventKind::CompletionQueueError).
///
/// A program gets completions by
///
///  - polling: [`poll`](Self::poll);
///  - sleeping until there are some: [`wait`](Self::wait), for a queue with a
///    [channel of its own](CompletionQueueBuilder::own_channel);
///  - an event loop, or one thread for many queues: [`poll_or_arm`](Self::poll_or_arm), for queues
///    with a [`CompletionChannel`];
///  - reading only the fields that are needed, timestamps among them: [`ExtendedPoller`], for an
///    [extended](CompletionQueueBuilder::extended) queue.
pub struct CompletionQueue<'ctx> {
    raw: Handle<ffi::ibv_cq>,
    notifier: Notifier<'ctx>,
    solicited_only: bool,
    extended: Option<Extended>,
    context: Parent<'ctx, Context<'ctx>>,
}

resource!(CompletionQueue<'ctx>: raw, notifier, context);

/// The channel on which a queue raises its events.
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

// SAFETY: libibverbs allows every verb on a completion queue from any thread; providers lock it
// while they poll.
unsafe impl Send for CompletionQueue<'_> {}
// SAFETY: as above.
unsafe impl Sync for CompletionQueue<'_> {}

impl<'ctx> CompletionQueue<'ctx> {
    /// `ibv_create_cq`: creates a completion queue with room for at least `entries` completions, for
    /// polling.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: `entries` is 0 or more than the device allows
    ///    ([`DeviceAttributes::max_cqe`](crate::DeviceAttributes::max_cqe)).
    ///  - `ENOMEM`: the device or the machine has run out of memory or completion queues, or
    ///    `RLIMIT_MEMLOCK` is too low.
    #[doc(alias = "ibv_create_cq")]
    pub fn new(context: impl Into<Parent<'ctx, Context<'ctx>>>, entries: u32) -> Result<Self> {
        Self::builder(context, entries).build()
    }

    /// Builds a completion queue with more options: see [`CompletionQueueBuilder`].
    pub fn builder(
        context: impl Into<Parent<'ctx, Context<'ctx>>>,
        entries: u32,
    ) -> CompletionQueueBuilder<'ctx> {
        CompletionQueueBuilder::new(context, entries)
    }

    pub(super) fn with(
        raw: Handle<ffi::ibv_cq>,
        notifier: Notifier<'ctx>,
        solicited_only: bool,
        extended: Option<Extended>,
        context: Parent<'ctx, Context<'ctx>>,
    ) -> Self {
        Self { raw, notifier, solicited_only, extended, context }
    }

    /// Takes over a queue that was created elsewhere, such as by a C library. It can be polled, but not
    /// waited for.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the pointer is null.
    ///
    /// # Safety
    ///
    /// `raw` is null or a live queue of `context`. Nothing else destroys it: dropping the
    /// `CompletionQueue` does, and waits until all its events that were read are acknowledged. If it is
    /// single-threaded, the conditions of [`CompletionQueueBuilder::single_threaded`] hold.
    pub unsafe fn from_raw(
        raw: *mut ffi::ibv_cq,
        context: impl Into<Parent<'ctx, Context<'ctx>>>,
    ) -> Result<Self> {
        const VERB: &str = "ibv_create_cq";
        if raw.is_null() {
            return Err(Error::invalid(VERB, "the completion queue is null"));
        }
        // SAFETY: the caller hands over a live queue.
        let raw = unsafe { Handle::new(VERB, raw) }?;
        Ok(Self::with(raw, Notifier::None, false, None, context.into()))
    }

    /// `ibv_poll_cq`: takes the oldest completions, at most as many as `completions` has room for, and
    /// returns them. It never waits; if the queue is empty it returns an empty slice.
    ///
    /// Pass the same slice each time: this allocates nothing and clears nothing. If the returned slice
    /// is shorter than `completions`, the queue is now empty.
    ///
    /// # Errors
    ///
    /// The provider's errno value: the queue is broken. Such an error completes no request: the
    /// requests' buffers still belong to the device.
    #[doc(alias = "ibv_poll_cq")]
    #[inline]
    pub fn poll<'c>(&self, completions: &'c mut [WorkCompletion]) -> Result<&'c [WorkCompletion]> {
        let room = c_int::try_from(completions.len()).unwrap_or(c_int::MAX);
        // SAFETY: the queue is live, and `completions` has room for that many, in the layout of C.
        let found =
            unsafe { ffi::ibv_poll_cq(self.as_raw(), room, completions.as_mut_ptr().cast()) };
        // One comparison separates a number of completions from every other value.
        if (found as u32).wrapping_sub(1) < room as u32 {
            // SAFETY: `found` is at most `room`, which is at most the length of the slice.
            Ok(unsafe { completions.get_unchecked(..found as usize) })
        } else if found == 0 {
            Ok(&completions[..0])
        } else {
            // A provider that claims more completions than it had room for is broken: return no
            // completions.
            let found = if found > 0 { -libc::EIO } else { found };
            Err(ffi::failed("ibv_poll_cq", found))
        }
    }

    /// `ibv_poll_cq`, for a queue with a [channel of its own](CompletionQueueBuilder::own_channel):
    /// sleeps until there is at least one completion, then takes the oldest, at most as many as
    /// `completions` has room for.
    ///
    /// It takes completions that are in the queue already without sleeping. Otherwise it arms the
    /// queue, polls again, and sleeps until the queue's event, so it misses no completion in between.
    /// Any number of threads can wait for the same queue; an event wakes all of them, and those that
    /// find nothing go back to sleep. A signal does not end the wait (`EINTR` is retried).
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the queue has no channel of its own, or `completions` is empty.
    ///  - `EOPNOTSUPP`: the device cannot arm a queue for solicited completions only.
    ///  - `EIO`: the device is gone.
    ///  - those of [`poll`](Self::poll).
    #[doc(alias = "ibv_req_notify_cq")]
    #[doc(alias = "ibv_get_cq_event")]
    pub fn wait<'c>(&self, completions: &'c mut [WorkCompletion]) -> Result<&'c [WorkCompletion]> {
        self.wait_until(completions, None)
    }

    /// [`wait`](Self::wait), but no longer than `timeout`.
    ///
    /// # Errors
    ///
    ///  - `ETIMEDOUT`: there was no completion in that time.
    ///  - those of [`wait`](Self::wait).
    pub fn wait_timeout<'c>(
        &self,
        completions: &'c mut [WorkCompletion],
        timeout: Duration,
    ) -> Result<&'c [WorkCompletion]> {
        self.wait_until(completions, event_file::deadline(timeout))
    }

    /// [`wait`](Self::wait), but not after `deadline`.
    ///
    /// # Errors
    ///
    ///  - `ETIMEDOUT`: there was no completion before the deadline.
    ///  - those of [`wait`](Self::wait).
    pub fn wait_deadline<'c>(
        &self,
        completions: &'c mut [WorkCompletion],
        deadline: Instant,
    ) -> Result<&'c [WorkCompletion]> {
        self.wait_until(completions, Some(deadline))
    }

    fn wait_until<'c>(
        &self,
        completions: &'c mut [WorkCompletion],
        deadline: Option<Instant>,
    ) -> Result<&'c [WorkCompletion]> {
        if completions.is_empty() {
            return Err(Error::invalid("ibv_poll_cq", "there is no room for a completion"));
        }
        let found = self.sleep_until(deadline, || {
            Ok(Some(self.poll(completions)?.len()).filter(|&found| found > 0))
        })?;
        Ok(&completions[..found])
    }

    /// Returns what `poll` finds; while it finds nothing, sleeps until there may be more and polls
    /// again.
    pub(crate) fn sleep_until<R>(
        &self,
        deadline: Option<Instant>,
        poll: impl FnMut() -> Result<Option<R>>,
    ) -> Result<R> {
        self.own_channel()?.sleep_until(deadline, poll, || self.arm())
    }

    /// The first half of sleeping on the queue's own channel: arms the queue. If a poll finds nothing
    /// after this, [`sleep`](Self::sleep) with the returned value misses no completion.
    pub(crate) fn arm_own(&self) -> Result<u64> {
        self.own_channel()?.arm(|| self.arm())
    }

    /// Arms the queue for a caller that sleeps until the queue's own channel is readable. Reads the event of
    /// the last arming first.
    pub(crate) fn rearm_own(&self) -> Result<()> {
        self.own_channel()?.rearm(|| self.arm())
    }

    /// The second half: sleeps until the queue has raised an event since it was armed, or until `cancelled`
    /// returns true. After that becomes true, [`Waiters::wake_all`] must be called.
    pub(crate) fn sleep(
        &self,
        seen: u64,
        deadline: Option<Instant>,
        cancelled: impl Fn() -> bool,
    ) -> Result<()> {
        self.own_channel()?.wait(seen, deadline, cancelled)
    }

    /// The threads that sleep on the queue's own channel. Those that begin to sleep after this call can be
    /// woken.
    pub(crate) fn wakeable(&self) -> Result<Arc<Waiters>> {
        self.own_channel()?.wakeable()
    }

    /// The channel that belongs to this queue alone.
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

    /// Whether arming the queue is for solicited completions only.
    pub(crate) fn is_solicited_only(&self) -> bool {
        self.solicited_only
    }

    /// `ibv_poll_cq`, then `ibv_req_notify_cq`: takes the oldest completions; if there are none, arms
    /// the queue and polls again. If it returns an empty slice, the queue is armed and empty: the next
    /// completion raises an event on the queue's channel.
    ///
    /// An event loop calls this until it returns an empty slice; see [`CompletionChannel`].
    ///
    /// # Errors
    ///
    ///  - those of [`poll`](Self::poll) and [`arm`](Self::arm).
    ///  - `EINVAL`: `completions` is empty.
    #[doc(alias = "ibv_poll_cq")]
    #[doc(alias = "ibv_req_notify_cq")]
    pub fn poll_or_arm<'c>(
        &self,
        completions: &'c mut [WorkCompletion],
    ) -> Result<&'c [WorkCompletion]> {
        if completions.is_empty() {
            return Err(Error::invalid("ibv_poll_cq", "there is no room for a completion"));
        }
        let found = self.poll(completions)?.len();
        if found > 0 {
            return Ok(&completions[..found]);
        }
        self.arm()?;
        self.poll(completions)
    }

    /// `ibv_req_notify_cq`: arms the queue. The next completion that is added, or the next solicited
    /// one if the queue is [for those](CompletionQueueBuilder::solicited_only), raises one event.
    ///
    /// Completions that are already in the queue raise no event: poll after arming, before going to
    /// sleep. [`poll_or_arm`](Self::poll_or_arm) does that.
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
        let returned = unsafe { ffi::ibv_req_notify_cq(self.as_raw(), self.solicited_only.into()) };
        ffi::status(VERB, returned)
    }

    /// `ibv_resize_cq`: changes the number of completions that the queue has room for, to at least
    /// `entries`. Completions in the queue stay there.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: `entries` is 0, more than the device allows, or less than the number of completions
    ///    in the queue.
    ///  - `EOPNOTSUPP`, `ENOSYS`: the device cannot resize; or its provider may leave the queue without
    ///    memory if this fails (`rxe`, `bnxt_re`, `hfi1verbs`, `ipathverbs`), so that the next poll
    ///    would crash: for those, use [`resize_unchecked`](Self::resize_unchecked).
    ///  - `EBUSY`: another resize is going on.
    ///  - `ENOMEM`: no memory.
    #[doc(alias = "ibv_resize_cq")]
    pub fn resize(&self, entries: u32) -> Result<()> {
        quirks::check_resize(RESIZE, &self.context.query_device()?)?;
        // SAFETY: this provider leaves the queue unchanged if this fails.
        unsafe { self.resize_unchecked(entries) }
    }

    /// [`resize`](Self::resize), on any device, including Soft-RoCE.
    ///
    /// # Errors
    ///
    /// Those of [`resize`](Self::resize).
    ///
    /// # Safety
    ///
    /// If the provider is `rxe`, `hfi1verbs`, `ipathverbs` or `bnxt_re`, and this fails with an error
    /// other than `EINVAL`: no thread uses the queue during or after this call, and with `bnxt_re` the
    /// queue is forgotten ([`std::mem::forget`]), not dropped. `EINVAL` leaves a queue of `rxe`
    /// unchanged.
    #[doc(alias = "ibv_resize_cq")]
    pub unsafe fn resize_unchecked(&self, entries: u32) -> Result<()> {
        let entries = capacity(RESIZE, entries, self.context.query_device()?.max_cqe())?;
        // SAFETY: the queue is live.
        let returned = unsafe { ffi::ibv_resize_cq(self.as_raw(), entries) };
        ffi::status(RESIZE, returned).map_err(|error| match error.raw_os_error() {
            // The device supports the number, as was checked, so this is the only cause left.
            libc::EINVAL => {
                Error::holds_more(RESIZE, entries as u32, "completions: poll them first")
            }
            _ => error,
        })
    }

    /// `ibv_modify_cq`: delays the event of an armed queue until it has `count` completions, or until
    /// `period` has passed since the first of them. With zero for both, each event is raised
    /// immediately.
    ///
    /// The device counts in microseconds: a fraction of one is rounded up.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the device does not support values that large; see
    ///    [`DeviceAttributes::moderation`](crate::DeviceAttributes::moderation).
    ///  - `EOPNOTSUPP`: the device does not support moderation.
    #[doc(alias = "ibv_modify_cq")]
    #[doc(alias = "ibv_moderate_cq")]
    pub fn moderate(&self, count: u16, period: Duration) -> Result<()> {
        const VERB: &str = "ibv_modify_cq";
        let ModerationCapabilities { max_count, max_period } =
            self.context.query_device()?.moderation();
        if (max_count, max_period) == (0, 0) {
            let reason = "the device does not moderate completion queues";
            return Err(Error::with_reason(VERB, libc::EOPNOTSUPP, reason));
        }
        if count > max_count {
            let (what, most) = ("the number of completions", max_count.into());
            return Err(Error::out_of_range(VERB, what, count.into(), 0, most));
        }
        let micros = period.as_nanos().div_ceil(1000);
        let Some(cq_period) = u16::try_from(micros).ok().filter(|&micros| micros <= max_period)
        else {
            let value = u64::try_from(micros).unwrap_or(u64::MAX);
            let (what, most) = ("the period in microseconds", max_period.into());
            return Err(Error::out_of_range(VERB, what, value, 0, most));
        };
        let mut attributes = ffi::ibv_modify_cq_attr {
            attr_mask: ffi::ibv_cq_attr_mask::IBV_CQ_ATTR_MODERATE.0,
            moderate: ffi::ibv_moderate_cq { cq_count: count, cq_period },
        };
        // SAFETY: the queue is live, and the attributes are read only.
        ffi::status(VERB, unsafe { ffi::ibv_modify_cq(self.as_raw(), &mut attributes) })
    }

    /// The number of completions that it has room for: at least as many as were requested.
    pub fn capacity(&self) -> u32 {
        // SAFETY: the queue is live. Another thread may resize it meanwhile.
        let entries = unsafe { AtomicI32::from_ptr(&raw mut (*self.as_raw()).cqe) };
        u32::try_from(entries.load(Ordering::Relaxed)).unwrap_or(0)
    }

    /// The number by which events name it: see [`CompletionQueueBuilder::token`].
    pub fn token(&self) -> usize {
        // SAFETY: the queue is live, and the token never changes.
        unsafe { (*self.as_raw()).cq_context as usize }
    }

    /// The shared channel on which it raises its events, if it was made with one.
    pub fn channel(&self) -> Option<&CompletionChannel<'ctx>> {
        match &self.notifier {
            Notifier::Shared(channel) => Some(channel),
            _ => None,
        }
    }

    /// Creates a poller for the queue, which must be an extended one: see [`ExtendedPoller::new`].
    ///
    /// # Errors
    ///
    /// Those of [`ExtendedPoller::new`].
    pub fn extended_poller(&self) -> Result<ExtendedPoller<'_>> {
        ExtendedPoller::new(self)
    }

    pub(super) fn extended(&self) -> Option<&Extended> {
        self.extended.as_ref()
    }

    /// The C object of the extended polling interface, if the queue was built with it. It is valid while
    /// the queue is. Polling it is unsound while an [`ExtendedPoller`] exists.
    #[inline]
    pub fn as_raw_extended(&self) -> Option<NonNull<ffi::ibv_cq_ex>> {
        self.extended.as_ref()?;
        NonNull::new(self.as_raw().cast())
    }

    /// The context that it was created on.
    pub fn context(&self) -> &Context<'ctx> {
        &self.context
    }

    /// The C object. It is valid while the queue is.
    #[inline]
    pub fn as_raw(&self) -> *mut ffi::ibv_cq {
        self.raw.as_ptr()
    }

    /// `ibv_destroy_cq`: destroys the queue, and returns the error if that fails, which dropping
    /// cannot.
    ///
    /// # Errors
    ///
    /// The queue is then [leaked](crate#when-a-resource-cannot-be-destroyed), with all that it was made from.
    ///
    ///  - `EBUSY`: a queue pair that uses it still exists (because it was leaked, or could not be
    ///    destroyed).
    #[doc(alias = "ibv_destroy_cq")]
    pub fn close(mut self) -> Result<()> {
        self.destroy()
    }
}

impl Context<'_> {
    /// `ibv_create_cq`: creates a completion queue with room for at least `entries` completions
    /// that borrows this context. See [`CompletionQueue::new`].
    ///
    /// # Errors
    ///
    /// Those of [`CompletionQueue::new`].
    #[doc(alias = "ibv_create_cq")]
    pub fn create_cq(&self, entries: u32) -> Result<CompletionQueue<'_>> {
        CompletionQueue::new(self, entries)
    }
}

impl fmt::Debug for CompletionQueue<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CompletionQueue")
            .field("device", &self.context.name())
            .field("capacity", &self.capacity())
            .finish_non_exhaustive()
    }
}
