use std::ffi::c_int;
use std::time::Duration;

use super::completion_channel::{CompletionChannel, WaitChannel};
use super::extended_completion::{CompletionFields, Extended};
use super::queue::{CompletionQueue, Notifier};
use crate::base::ffi::ibv_cq_init_attr_mask as Mask;
use crate::base::{Detail, Error, Handle, Parent, Result, debug, ffi, setters};
use crate::verbs::device::{ContextRef, ModerationCapabilities, quirks};
use crate::verbs::domain::DomainRef;

/// Options for a new completion queue: see [`CompletionQueue::builder`].
///
/// ```no_run
/// # // not on Soft-RoCE alone: needs time stamps
/// use ibverbs::{CompletionQueue, WorkCompletion};
///
/// # fn main() -> ibverbs::Result<()> {
/// let context = ibverbs::open("mlx5_0")?;
/// let queue = CompletionQueue::builder(&context, 1024)
///     .own_channel()
///     .completion_vector(context.completion_vectors() - 1)
///     .build()?;
/// let mut completions = [WorkCompletion::default(); 32];
/// for completion in queue.wait(&mut completions)? {
///     println!("{completion:?}");
/// }
/// # Ok(())
/// # }
/// ```
#[doc(alias = "ibv_cq_init_attr_ex")]
#[must_use]
pub struct CompletionQueueBuilder<'ctx> {
    context: ContextRef<'ctx>,
    entries: u32,
    channel: Channel<'ctx>,
    token: usize,
    completion_vector: Option<u32>,
    solicited_only: bool,
    fields: Option<CompletionFields>,
    flags: ffi::ibv_create_cq_attr_flags,
    domain: Option<DomainRef<'ctx>>,
}

#[derive(Debug)]
enum Channel<'ctx> {
    None,
    Own,
    Shared(Parent<'ctx, CompletionChannel<'ctx>>),
}

impl<'ctx> CompletionQueue<'ctx> {
    /// A [`CompletionQueueBuilder`] for more options.
    pub fn builder(
        context: impl Into<ContextRef<'ctx>>,
        entries: u32,
    ) -> CompletionQueueBuilder<'ctx> {
        CompletionQueueBuilder::new(context, entries)
    }
}

impl<'ctx> CompletionQueueBuilder<'ctx> {
    /// Options for a queue with room for at least `entries` completions.
    pub fn new(context: impl Into<ContextRef<'ctx>>, entries: u32) -> Self {
        Self {
            context: context.into(),
            entries,
            channel: Channel::None,
            token: 0,
            completion_vector: None,
            solicited_only: false,
            fields: None,
            flags: ffi::ibv_create_cq_attr_flags(0),
            domain: None,
        }
    }

    /// Gives the queue a channel of its own, on which [`CompletionQueue::wait`] can sleep. Replaces
    /// [`channel`](Self::channel).
    pub fn own_channel(mut self) -> Self {
        self.channel = Channel::Own;
        self
    }

    /// Makes the queue raise its events on `channel`, of the same context, which other queues may share. Replaces
    /// [`own_channel`](Self::own_channel).
    pub fn channel(mut self, channel: impl Into<Parent<'ctx, CompletionChannel<'ctx>>>) -> Self {
        self.channel = Channel::Shared(channel.into());
        self
    }

    setters! { self,
        /// The number (0 unless set) that names the queue in events of its channel
        /// ([`CompletionEvent::token`](crate::completion::CompletionEvent::token)) and of the device
        /// ([`AsyncEvent`](crate::device::AsyncEvent)).
        #[doc(alias = "cq_context")]
        token(token: usize) => self.token = token;

        /// The interrupt that serves the queue: an index (0 unless set) below
        /// [`Context::completion_vectors`](crate::Context::completion_vectors). Different vectors let different processors serve queues.
        #[doc(alias = "comp_vector")]
        completion_vector(vector: u32) => self.completion_vector = Some(vector);

        /// Makes [`wait`](CompletionQueue::wait), [`arm`](CompletionQueue::arm) and
        /// [`poll_or_arm`](CompletionQueue::poll_or_arm) wait for a message that was sent *solicited*, or a request
        /// that fails. Other completions raise no event; polling still finds them.
        solicited_only() => self.solicited_only = true;

        /// `ibv_create_cq_ex`: makes a queue that reports `fields`, and that an
        /// [`ExtendedPoller`](crate::completion::ExtendedPoller) can poll too.
        #[doc(alias = "wc_flags")]
        extended(fields: CompletionFields) => self.fields = Some(fields);
    }

    /// `IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN`: the device overwrites the oldest completion of a full queue, which does not
    /// break. Makes the queue [`extended`](Self::extended).
    ///
    /// Overwritten completions are lost, so the queue still needs room for all outstanding requests. The option only
    /// saves the device a check.
    #[doc(alias = "IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN")]
    pub fn ignore_overrun(mut self) -> Self {
        self.flags |= ffi::ibv_create_cq_attr_flags::IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN;
        self
    }

    /// `IBV_CREATE_CQ_ATTR_SINGLE_THREADED`: the provider takes no lock. Makes the queue [`extended`](Self::extended).
    ///
    /// # Safety
    ///
    /// No two calls that concern the queue overlap, on two threads or within the closure of
    /// [`ExtendedPoller::poll`](crate::completion::ExtendedPoller::poll). Such calls are all methods of the queue, of
    /// its poller, of channels that share it, and of senders of these (`LoopSender`); and
    /// destroying a queue pair or shared receive queue that completes to it, or changing its state.
    #[doc(alias = "IBV_CREATE_CQ_ATTR_SINGLE_THREADED")]
    pub unsafe fn single_threaded(mut self) -> Self {
        self.flags |= ffi::ibv_create_cq_attr_flags::IBV_CREATE_CQ_ATTR_SINGLE_THREADED;
        self
    }

    /// `IBV_CQ_INIT_ATTR_MASK_PD`: makes the queue use the allocator and thread domain of a [parent
    /// domain](crate::ProtectionDomain::parent_domain). Makes it [`extended`](Self::extended). Only efa, hns, ionic and mlx5
    /// have this.
    #[doc(alias = "IBV_CQ_INIT_ATTR_MASK_PD")]
    pub fn parent_domain(mut self, domain: impl Into<DomainRef<'ctx>>) -> Self {
        self.domain = Some(domain.into());
        self
    }

    /// `ibv_create_cq`, or `ibv_create_cq_ex` for an [`extended`](Self::extended) queue: creates the queue.
    ///
    /// # Errors
    ///
    /// Those of [`CompletionQueue::new`], and:
    ///
    ///  - `EINVAL`: the device has no such completion vector; the channel or the domain belongs to another context; or
    ///    the domain is no parent domain.
    ///  - `EOPNOTSUPP`: the device has no extended queues, or not with these fields or flags.
    ///  - `EMFILE`, `ENFILE`: too many files are open for a channel of its own.
    #[doc(alias = "ibv_create_cq")]
    #[doc(alias = "ibv_create_cq_ex")]
    pub fn build(self) -> Result<CompletionQueue<'ctx>> {
        let fields = match self.fields {
            None if self.flags.0 != 0 || self.domain.is_some() => Some(CompletionFields::empty()),
            fields => fields,
        };
        let verb = if fields.is_some() { "ibv_create_cq_ex" } else { "ibv_create_cq" };
        let device = self.context.limits()?;
        let entries = capacity(verb, self.entries, device.max_cqe())?;
        let vector = self.vector(verb)?;
        let notifier = match self.channel {
            Channel::None => Notifier::None,
            Channel::Own => {
                let channel = CompletionChannel::new(self.context.clone())?;
                Notifier::Own(WaitChannel::new(channel))
            }
            Channel::Shared(channel) => {
                let reason = "the completion channel belongs to another context";
                self.context.check_same(channel.context(), verb, reason)?;
                Notifier::Shared(channel)
            }
        };
        let channel = notifier.channel().map_or(std::ptr::null_mut(), CompletionChannel::as_raw);
        let cq_context = std::ptr::without_provenance_mut(self.token);
        let (raw, extended) = match fields {
            None => {
                // SAFETY: the context and the channel are live; a queue that comes back is ours alone.
                let raw = unsafe {
                    let raw = ffi::ibv_create_cq(
                        self.context.as_raw(),
                        entries,
                        cq_context,
                        channel,
                        vector,
                    );
                    Handle::new(verb, raw)
                }?;
                (raw, None)
            }
            Some(fields) => {
                let mut attributes = ffi::ibv_cq_init_attr_ex {
                    cqe: entries.unsigned_abs(),
                    cq_context,
                    channel,
                    comp_vector: vector.unsigned_abs(),
                    wc_flags: fields.bits(),
                    flags: self.flags.0,
                    ..Default::default()
                };
                if self.flags.0 != 0 {
                    attributes.comp_mask |= Mask::IBV_CQ_INIT_ATTR_MASK_FLAGS.0;
                }
                if let Some(domain) = &self.domain {
                    let reason = "the domain belongs to another context";
                    self.context.check_same(domain.context(), verb, reason)?;
                    attributes.comp_mask |= Mask::IBV_CQ_INIT_ATTR_MASK_PD.0;
                    attributes.parent_domain = domain.as_raw();
                }
                let (raw, extended) = Extended::create(&self.context, &mut attributes, device)?;
                (raw, Some(extended))
            }
        };
        let Self { solicited_only, domain, context, .. } = self;
        Ok(CompletionQueue { raw, notifier, solicited_only, extended, domain, context })
    }

    /// A device without vectors accepts the default.
    fn vector(&self, verb: &'static str) -> Result<c_int> {
        let Some(vector) = self.completion_vector else { return Ok(0) };
        let count = self.context.completion_vectors();
        match c_int::try_from(vector) {
            Ok(valid) if vector < count => Ok(valid),
            _ => {
                let what = "the completion vector";
                let (low, high) = if count == 0 { (1, 0) } else { (0, u64::from(count) - 1) };
                Err(Error::out_of_range(verb, what, vector.into(), low, high))
            }
        }
    }
}

pub(super) fn capacity(verb: &'static str, entries: u32, most: u32) -> Result<c_int> {
    Error::within(verb, "the number of entries", entries, 1, most.min(c_int::MAX as u32))?;
    Ok(entries as c_int)
}

debug! {
    CompletionQueueBuilder<'_>, self,
    entries: self.entries, channel: self.channel, token: self.token,
    completion_vector: self.completion_vector, solicited_only: self.solicited_only,
    fields: self.fields, flags: self.flags, ..
}

const RESIZE: &str = "ibv_resize_cq";

impl CompletionQueue<'_> {
    /// `ibv_resize_cq`: changes the room of the queue to at least `entries` completions. It keeps its completions.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: `entries` is 0, more than the device allows, or less than the number of completions in the queue.
    ///  - `EOPNOTSUPP`, `ENOSYS`: the device cannot resize; or a failure would make the next poll crash (`rxe`,
    ///    `bnxt_re`, `hfi1verbs`, `ipathverbs`): see [`resize_unchecked`](Self::resize_unchecked).
    ///  - `EBUSY`: another resize is going on.
    ///  - `ENOMEM`: no memory.
    #[doc(alias = "ibv_resize_cq")]
    pub fn resize(&self, entries: u32) -> Result<()> {
        quirks::check_resize(RESIZE, &self.context().query_device()?)?;
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
    /// If this fails on `rxe`, `hfi1verbs`, `ipathverbs` or `bnxt_re`, other than with `EINVAL`: no thread uses the
    /// queue during or after this call, and with `bnxt_re` the queue is forgotten ([`std::mem::forget`]), not dropped.
    /// `EINVAL` leaves a queue of `rxe` unchanged.
    pub unsafe fn resize_unchecked(&self, entries: u32) -> Result<()> {
        let entries = capacity(RESIZE, entries, self.context().query_device()?.max_cqe())?;
        // SAFETY: the queue is live.
        let returned = unsafe { ffi::ibv_resize_cq(self.as_raw(), entries) };
        ffi::status(RESIZE, returned).map_err(|error| match error.errno() {
            // The number was checked: no other cause is left.
            libc::EINVAL => {
                let (more_than, what) = (entries as u32, "completions: poll them first");
                Error::with(RESIZE, libc::EINVAL, Detail::Holds { more_than, what })
            }
            _ => error,
        })
    }

    /// `ibv_modify_cq`: delays the event of an armed queue until it has `count` completions, or until `period` has
    /// passed since the first. Zero for both raises each event immediately.
    ///
    /// The device counts microseconds; fractions are rounded up.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the values exceed [`DeviceAttributes::moderation`](crate::device::DeviceAttributes::moderation).
    ///  - `EOPNOTSUPP`: the device does not support moderation.
    #[doc(alias = "ibv_modify_cq")]
    #[doc(alias = "ibv_moderate_cq")]
    pub fn moderate(&self, count: u16, period: Duration) -> Result<()> {
        const VERB: &str = "ibv_modify_cq";
        let ModerationCapabilities { max_count, max_period } =
            self.context().query_device()?.moderation();
        let reason = "the device does not moderate completion queues";
        Error::unsupported_if((max_count, max_period) == (0, 0), VERB, reason)?;
        Error::within(VERB, "the number of completions", count, 0, max_count)?;
        let micros = u64::try_from(period.as_nanos().div_ceil(1000)).unwrap_or(u64::MAX);
        Error::within(VERB, "the period in microseconds", micros, 0, max_period)?;
        let cq_period = micros as u16;
        let mut attributes = ffi::ibv_modify_cq_attr {
            attr_mask: ffi::ibv_cq_attr_mask::IBV_CQ_ATTR_MODERATE.0,
            moderate: ffi::ibv_moderate_cq { cq_count: count, cq_period },
        };
        // SAFETY: the queue is live, and the attributes are read only.
        ffi::status(VERB, unsafe { ffi::ibv_modify_cq(self.as_raw(), &mut attributes) })
    }
}
