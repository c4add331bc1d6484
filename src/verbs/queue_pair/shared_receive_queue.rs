//! Shared receive queues.

use crate::base::{
    Detail, Error, Handle, Leak, Parent, Result, debug, ffi, getters, object, resource,
};
use crate::verbs::completion::QueueRef;
use crate::verbs::device::{quirks, token};
use crate::verbs::domain::{DomainRef, ProtectionDomain, XrcDomain};
use std::sync::atomic::{AtomicU32, Ordering};

object!(ibv_srq, ibv_destroy_srq, event_acks);

/// `struct ibv_srq`: a receive queue that many queue pairs share.
///
/// Each arriving message takes the next request, on any of the queue pairs. So a server needs memory for the messages
/// of all peers together, not of each. The completion names the queue pair.
///
/// ```
/// use ibverbs::{QueuePairType, SharedReceiveQueue};
///
/// # fn main() -> ibverbs::Result<()> {
/// # let rxe0 = ibverbs_software::Device::builder().name("rxe0").build().unwrap();
/// # rxe0.register();
/// let context = ibverbs::open("rxe0")?;
/// let domain = context.alloc_pd()?;
/// let receives = domain.create_srq(256, 1)?;
/// let mut region = domain.allocate::<u8>(256 * 64)?;
/// for slot in 0..256_usize {
///     // SAFETY: the region is not touched until the completion of each slot was polled.
///     unsafe { receives.post_receive(&mut region, slot * 64..(slot + 1) * 64, slot as u64)? };
/// }
/// # Ok(())
/// # }
/// ```
#[doc(alias = "ibv_srq")]
pub struct SharedReceiveQueue<'pd> {
    raw: Handle<ffi::ibv_srq>,
    max_wr: AtomicU32,
    max_sge: u32,
    domain: DomainRef<'pd>,
    pub(super) extended: Option<Extended<'pd>>,
}

resource! {
    /// `ibv_destroy_srq`: destroys the queue and reports a failure, which a drop ignores. Outstanding requests end
    /// without completion.
    ///
    /// # Errors
    ///
    /// The queue is then [leaked](crate::_guide::verbs#when-a-resource-cannot-be-destroyed), with its parents.
    ///
    ///  - `EBUSY`: a leaked queue pair uses it.
    #[doc(alias = "ibv_destroy_srq")]
    SharedReceiveQueue<'pd>: raw of ibv_srq, extended, domain
}

/// XRC queues have a domain, tag matching queues none.
pub(super) struct Extended<'pd> {
    pub(super) domain: Option<Parent<'pd, XrcDomain<'pd>>>,
    pub(super) queue: QueueRef<'pd>,
    pub(super) max_tag_sge: u32,
}

impl Leak for Extended<'_> {
    fn leak(&self) {
        self.domain.leak();
        self.queue.leak();
    }
}

/// `struct ibv_srq_attr`: the result of [`SharedReceiveQueue::query`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[doc(alias = "ibv_srq_attr")]
pub struct SharedReceiveQueueAttributes {
    /// Outstanding requests, at most.
    pub max_wr: u32,
    /// Scatter elements of a request, at most.
    pub max_sge: u32,
    /// The device raises the limit event below this number of outstanding requests; 0 if not armed.
    pub limit: u32,
}

impl<'pd> SharedReceiveQueue<'pd> {
    /// `ibv_create_srq`: creates a queue for at least `max_wr` requests of at least `max_sge` scatter elements.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: one of them is 0, or more than the device allows
    ///    ([`DeviceAttributes::max_srq_wr`](crate::device::DeviceAttributes::max_srq_wr),
    ///    [`max_srq_sge`](crate::device::DeviceAttributes::max_srq_sge)).
    ///  - `EOPNOTSUPP`, `ENOSYS`: the device has no shared receive queues.
    ///  - `ENOMEM`: the device has none left, or `RLIMIT_MEMLOCK` is too low.
    #[doc(alias = "ibv_create_srq")]
    pub fn new(domain: impl Into<DomainRef<'pd>>, max_wr: u32, max_sge: u32) -> Result<Self> {
        const VERB: &str = "ibv_create_srq";
        let domain = domain.into();
        check(VERB, &domain, max_wr, max_sge)?;
        let mut attributes = ffi::ibv_srq_init_attr {
            attr: ffi::ibv_srq_attr { max_wr, max_sge, srq_limit: 0 },
            ..Default::default()
        };
        // SAFETY: the domain is live; a queue that comes back is ours alone.
        let raw =
            unsafe { Handle::new(VERB, ffi::ibv_create_srq(domain.as_raw(), &mut attributes)) }?;
        let ffi::ibv_srq_attr { max_wr, max_sge, .. } = attributes.attr;
        Ok(Self { raw, max_wr: max_wr.into(), max_sge, domain, extended: None })
    }

    /// `ibv_create_srq_ex`: creates a queue for extended reliable connections (XRC). Senders name its
    /// [`number`](Self::number). It completes on `queue`, not on the completion queue of the receiving queue pair.
    ///
    /// # Errors
    ///
    /// Those of [`new`](Self::new), and
    ///
    ///  - `EINVAL`: the XRC domain or the completion queue belongs to another context.
    #[doc(alias = "ibv_create_srq_ex")]
    pub fn extended(
        domain: impl Into<DomainRef<'pd>>,
        xrc_domain: impl Into<Parent<'pd, XrcDomain<'pd>>>,
        queue: impl Into<QueueRef<'pd>>,
        max_wr: u32,
        max_sge: u32,
    ) -> Result<Self> {
        const VERB: &str = "ibv_create_srq_ex";
        let (domain, xrc_domain, queue) = (domain.into(), xrc_domain.into(), queue.into());
        for other in [xrc_domain.context(), queue.context()] {
            let reason = "the XRC domain or the completion queue belongs to another context";
            domain.context().check_same(other, VERB, reason)?;
        }
        check(VERB, &domain, max_wr, max_sge)?;
        let attributes = ffi::ibv_srq_init_attr_ex {
            comp_mask: ffi::ibv_srq_init_attr_mask::IBV_SRQ_INIT_ATTR_XRCD.0,
            srq_type: ffi::ibv_srq_type::IBV_SRQT_XRC,
            xrcd: xrc_domain.as_raw(),
            ..Default::default()
        };
        let extended = Extended { domain: Some(xrc_domain), queue, max_tag_sge: 0 };
        Self::create(domain, extended, max_wr, max_sge, attributes)
    }

    /// `attributes` names `extended`'s kind of queue, with objects of the same context.
    pub(super) fn create(
        domain: DomainRef<'pd>,
        extended: Extended<'pd>,
        max_wr: u32,
        max_sge: u32,
        mut attributes: ffi::ibv_srq_init_attr_ex,
    ) -> Result<Self> {
        use ffi::ibv_srq_init_attr_mask as mask;

        let fields =
            mask::IBV_SRQ_INIT_ATTR_TYPE | mask::IBV_SRQ_INIT_ATTR_PD | mask::IBV_SRQ_INIT_ATTR_CQ;
        attributes.attr = ffi::ibv_srq_attr { max_wr, max_sge, srq_limit: 0 };
        attributes.comp_mask |= fields.0;
        (attributes.pd, attributes.cq) = (domain.as_raw(), extended.queue.as_raw());
        // SAFETY: context, domains and queue are live, and kept; a queue that comes back is ours alone.
        let raw = unsafe {
            let raw = ffi::ibv_create_srq_ex(domain.context().as_raw(), &mut attributes);
            Handle::new("ibv_create_srq_ex", raw)
        }?;
        let ffi::ibv_srq_attr { max_wr, max_sge, .. } = attributes.attr;
        Ok(Self { raw, max_wr: max_wr.into(), max_sge, domain, extended: Some(extended) })
    }

    /// Takes over a queue that other code created, such as a C library.
    ///
    /// # Errors
    ///
    /// The caller then keeps the queue.
    ///
    ///  - `EINVAL`: the pointer is null, or the queue belongs to another domain.
    ///  - Those of [`query`](Self::query).
    ///
    /// # Safety
    ///
    /// `raw` is null or a live shared receive queue that nothing else destroys. If it is for XRC, its XRC domain and
    /// completion queue outlive it. From now on its `srq_context` is the [`token`](Self::token), which no code treats
    /// as a pointer. The memory of its outstanding receives meets the contract of [`post`](Self::post).
    pub unsafe fn from_raw(
        raw: *mut ffi::ibv_srq,
        domain: impl Into<DomainRef<'pd>>,
    ) -> Result<Self> {
        const VERB: &str = "ibv_create_srq";
        let domain = domain.into();
        // SAFETY: the caller vouches for the pointer.
        let is_foreign = raw.is_null() || unsafe { (*raw).pd } != domain.as_raw();
        Error::invalid_if(is_foreign, VERB, "not a shared receive queue of this domain")?;
        // SAFETY: the queue is live.
        let SharedReceiveQueueAttributes { max_wr, max_sge, .. } = unsafe { query(raw) }?;
        // SAFETY: the caller hands over a live queue.
        let raw = unsafe { Handle::new(VERB, raw) }?;
        Ok(Self { raw, max_wr: max_wr.into(), max_sge, domain, extended: None })
    }

    /// `ibv_query_srq`: the current depth and limit.
    ///
    /// # Errors
    ///
    ///  - `EIO`, `ENODEV`: the device is gone.
    #[doc(alias = "ibv_query_srq")]
    pub fn query(&self) -> Result<SharedReceiveQueueAttributes> {
        // SAFETY: the queue is live.
        unsafe { query(self.as_raw()) }
    }

    /// `ibv_modify_srq`: arms the limit event; 0 disarms it. Below `limit` outstanding requests, the device raises
    /// [`SRQ_LIMIT_REACHED`](ffi::ibv_event_type::IBV_EVENT_SRQ_LIMIT_REACHED) once.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: `limit` is more than the queue's depth.
    ///  - `EOPNOTSUPP`, `ENOSYS`: the device does not support this.
    #[doc(alias = "ibv_modify_srq")]
    pub fn set_limit(&self, limit: u32) -> Result<()> {
        Error::within("ibv_modify_srq", "the limit", limit, 0, self.max_wr())?;
        let attributes = ffi::ibv_srq_attr { srq_limit: limit, ..Default::default() };
        self.modify(attributes, ffi::ibv_srq_attr_mask::IBV_SRQ_LIMIT)
    }

    /// `ibv_modify_srq`: changes how many requests can be outstanding.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: `max_wr` is 0, more than the device allows, or less than the outstanding requests or the armed
    ///    [limit](Self::set_limit).
    ///  - `EOPNOTSUPP`, `ENOSYS`: the device cannot resize; or the provider (`rxe`, `bnxt_re`, `hfi1verbs`,
    ///    `ipathverbs`) may free the queue's memory if it fails, so that the next post crashes: use
    ///    [`resize_unchecked`](Self::resize_unchecked).
    ///  - `ENOMEM`: no memory.
    #[doc(alias = "ibv_modify_srq")]
    pub fn resize(&self, max_wr: u32) -> Result<()> {
        quirks::check_resize("ibv_modify_srq", &self.domain.context().query_device()?)?;
        // SAFETY: `check_resize` passed only providers that leave the queue as it was on failure.
        unsafe { self.resize_unchecked(max_wr) }
    }

    /// As [`resize`](Self::resize), on any provider.
    ///
    /// # Errors
    ///
    /// Those of [`resize`](Self::resize).
    ///
    /// # Safety
    ///
    /// If the provider is `rxe`, `hfi1verbs`, `ipathverbs` or `bnxt_re`, and this fails with anything but `EINVAL`, no
    /// thread uses the queue during the call or after it. `EINVAL` leaves a queue of `rxe` as it was.
    pub unsafe fn resize_unchecked(&self, max_wr: u32) -> Result<()> {
        const VERB: &str = "ibv_modify_srq";
        let most = self.domain.context().query_device()?.max_srq_wr();
        Error::within(VERB, "max_wr", max_wr, 1, most)?;
        let attributes = ffi::ibv_srq_attr { max_wr, ..Default::default() };
        self.modify(attributes, ffi::ibv_srq_attr_mask::IBV_SRQ_MAX_WR).map_err(
            |error| match error.errno() {
                libc::EINVAL => match self.query() {
                    Ok(found) if max_wr < found.limit => {
                        let (value, low) = (max_wr.into(), found.limit);
                        Error::out_of_range(VERB, "max_wr", value, low, most.into())
                    }
                    _ => Error::with(
                        VERB,
                        libc::EINVAL,
                        Detail::Holds { more_than: max_wr, what: "receives" },
                    ),
                },
                _ => error,
            },
        )?;
        self.max_wr.store(self.query()?.max_wr, Ordering::Relaxed);
        Ok(())
    }

    fn modify(
        &self,
        mut attributes: ffi::ibv_srq_attr,
        mask: ffi::ibv_srq_attr_mask,
    ) -> Result<()> {
        // SAFETY: the queue is live; the mask is one defined bit.
        let returned =
            unsafe { ffi::ibv_modify_srq(self.as_raw(), &mut attributes, mask.0 as i32) };
        ffi::status("ibv_modify_srq", returned)
    }

    /// `ibv_get_srq_num`: the number by which XRC senders address it.
    ///
    /// # Errors
    ///
    ///  - `EOPNOTSUPP`: the device does not number its queues.
    #[doc(alias = "ibv_get_srq_num")]
    pub fn number(&self) -> Result<u32> {
        let mut number = 0;
        // SAFETY: the queue is live and `number` is writable.
        let returned = unsafe { ffi::ibv_get_srq_num(self.as_raw(), &mut number) };
        ffi::status("ibv_get_srq_num", returned)?;
        Ok(number)
    }

    /// How many requests can be outstanding: at least as many as asked for.
    pub fn max_wr(&self) -> u32 {
        self.max_wr.load(Ordering::Relaxed)
    }

    getters! { self,
        /// How many scatter elements a request can have: at least as many as asked for.
        max_sge: u32 => self.max_sge;

        /// The domain that it was created in.
        protection_domain: &ProtectionDomain<'pd> => &self.domain;
    }
}

pub(super) fn check(
    verb: &'static str,
    domain: &ProtectionDomain<'_>,
    max_wr: u32,
    max_sge: u32,
) -> Result<()> {
    let device = domain.context().query_device()?;
    Error::unsupported_if(device.max_srq() == 0, verb, "the device has no shared receive queues")?;
    Error::within(verb, "max_wr", max_wr, 1, device.max_srq_wr())?;
    Error::within(verb, "max_sge", max_sge, 1, device.max_srq_sge())
}

/// # Safety
///
/// The queue is live.
unsafe fn query(queue: *mut ffi::ibv_srq) -> Result<SharedReceiveQueueAttributes> {
    let mut raw = ffi::ibv_srq_attr::default();
    // SAFETY: the caller vouches for the queue, and `raw` is writable.
    let returned = unsafe { ffi::ibv_query_srq(queue, &mut raw) };
    ffi::status("ibv_query_srq", returned)?;
    let ffi::ibv_srq_attr { max_wr, max_sge, srq_limit: limit } = raw;
    Ok(SharedReceiveQueueAttributes { max_wr, max_sge, limit })
}

debug! { SharedReceiveQueue<'_>, self, max_wr: self.max_wr(), max_sge: self.max_sge, .. }

impl ProtectionDomain<'_> {
    /// `ibv_create_srq`: [`SharedReceiveQueue::new`], borrowing this domain.
    ///
    /// # Errors
    ///
    /// Those of [`SharedReceiveQueue::new`].
    #[doc(alias = "ibv_create_srq")]
    pub fn create_srq(&self, max_wr: u32, max_sge: u32) -> Result<SharedReceiveQueue<'_>> {
        SharedReceiveQueue::new(self, max_wr, max_sge)
    }
}

impl SharedReceiveQueue<'_> {
    /// The number by which [`AsyncEvents`](crate::device::AsyncEvents) name this queue; 0 unless set.
    #[doc(alias = "srq_context")]
    pub fn token(&self) -> usize {
        // SAFETY: the queue is live.
        unsafe { token(self.as_raw()) }.load(Ordering::Relaxed) as usize
    }

    /// Sets the [`token`](Self::token), for events that are read from now on.
    pub fn set_token(&self, to: usize) {
        // SAFETY: the queue is live.
        unsafe { token(self.as_raw()) }
            .store(std::ptr::without_provenance_mut(to), Ordering::Relaxed);
    }
}
