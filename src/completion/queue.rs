//! Completion queues.

use std::ffi::c_int;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicI32, Ordering};

use super::completion_channel::{CompletionChannel, WaitChannel};
use super::extended::Extended;
use super::work_completion::WorkCompletion;
use crate::debug::debug;
use crate::device::Context;
use crate::domain::ProtectionDomain;
use crate::error::{Error, Result};
use crate::ffi;
use crate::handle::{Handle, Leak, object, resource};
use crate::parent::Parent;

object!(ibv_cq, ibv_destroy_cq, event_subjects);

/// `struct ibv_cq`: a queue to which the device adds the completions of work requests.
///
/// One completion queue can serve the send and the receive queues of many queue pairs. It must have
/// room for all completions that are not polled yet: a device that finds it full drops completions and
/// raises [`CompletionQueueError`](crate::device::AsyncEventKind::CompletionQueueError).
///
/// A program gets completions by
///
///  - polling: [`poll`](Self::poll);
///  - sleeping until there are some: [`wait`](Self::wait), for a queue with a
///    [channel of its own](crate::CompletionQueueBuilder::own_channel);
///  - an event loop, or one thread for many queues: [`poll_or_arm`](Self::poll_or_arm), for queues
///    with a [`CompletionChannel`];
///  - reading only the fields that are needed, timestamps among them: [`ExtendedPoller`](crate::completion::ExtendedPoller), for an
///    [extended](crate::CompletionQueueBuilder::extended) queue.
pub struct CompletionQueue<'ctx> {
    pub(super) raw: Handle<ffi::ibv_cq>,
    pub(super) notifier: Notifier<'ctx>,
    pub(super) solicited_only: bool,
    pub(super) extended: Option<Extended>,
    pub(super) domain: Option<Parent<'ctx, ProtectionDomain<'ctx>>>,
    pub(super) context: Parent<'ctx, Context<'ctx>>,
}

resource! {
    /// `ibv_destroy_cq`: destroys the queue, and returns the error if that fails, which dropping
    /// cannot.
    ///
    /// # Errors
    ///
    /// The queue is then [leaked](crate::_guide::verbs#when-a-resource-cannot-be-destroyed), with all that it was made from.
    ///
    ///  - `EBUSY`: a queue pair that uses it still exists (because it was leaked, or could not be
    ///    destroyed).
    #[doc(alias = "ibv_destroy_cq")]
    CompletionQueue<'ctx>: raw of ibv_cq, notifier, domain, context
}

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

impl<'ctx> CompletionQueue<'ctx> {
    /// `ibv_create_cq`: creates a completion queue with room for at least `entries` completions, for
    /// polling.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: `entries` is 0 or more than the device allows
    ///    ([`DeviceAttributes::max_cqe`](crate::device::DeviceAttributes::max_cqe)).
    ///  - `ENOMEM`: the device or the machine has run out of memory or completion queues, or
    ///    `RLIMIT_MEMLOCK` is too low.
    #[doc(alias = "ibv_create_cq")]
    pub fn new(context: impl Into<Parent<'ctx, Context<'ctx>>>, entries: u32) -> Result<Self> {
        Self::builder(context, entries).build()
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
    /// single-threaded, the conditions of
    /// [`CompletionQueueBuilder::single_threaded`](crate::CompletionQueueBuilder::single_threaded) hold.
    pub unsafe fn from_raw(
        raw: *mut ffi::ibv_cq,
        context: impl Into<Parent<'ctx, Context<'ctx>>>,
    ) -> Result<Self> {
        const VERB: &str = "ibv_create_cq";
        Error::invalid_if(raw.is_null(), VERB, "the completion queue is null")?;
        // SAFETY: the caller hands over a live queue.
        let raw = unsafe { Handle::new(VERB, raw) }?;
        let (notifier, context) = (Notifier::None, context.into());
        Ok(Self { raw, notifier, solicited_only: false, extended: None, domain: None, context })
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

    /// The number of completions that it has room for: at least as many as were requested.
    pub fn capacity(&self) -> u32 {
        // SAFETY: the queue is live. Another thread may resize it meanwhile.
        let entries = unsafe { AtomicI32::from_ptr(&raw mut (*self.as_raw()).cqe) };
        u32::try_from(entries.load(Ordering::Relaxed)).unwrap_or(0)
    }

    /// The number by which events name it: see [`CompletionQueueBuilder::token`](crate::CompletionQueueBuilder::token).
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

    pub(super) fn extended(&self) -> Option<&Extended> {
        self.extended.as_ref()
    }

    /// The C object of the extended polling interface, if the queue was built with it. It is valid while
    /// the queue is. Polling it is unsound while an [`ExtendedPoller`](crate::completion::ExtendedPoller) exists.
    #[inline]
    pub fn as_raw_extended(&self) -> Option<NonNull<ffi::ibv_cq_ex>> {
        self.extended.as_ref()?;
        NonNull::new(self.as_raw().cast())
    }

    /// The context that it was created on.
    pub fn context(&self) -> &Context<'ctx> {
        &self.context
    }
}

impl Context<'_> {
    /// `ibv_create_cq`: creates a completion queue with room for at least `entries` completions
    /// that borrows this context. See [`CompletionQueue::new`].
    ///
    /// For a value that leaves its function: `CompletionQueue::new(context, ..)`, with the context by value or in an `Arc`.
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
