use std::ops::RangeBounds;
use std::sync::{Mutex, PoisonError};
use std::{fmt, ptr};

use crate::base::{Error, Handle, Parent, Result, c_enum, debug, ffi, getters, object, resource};
use crate::verbs::completion::{CompletionQueue, QueueRef};
use crate::verbs::device::Context;
use crate::verbs::domain::{DomainRef, ProtectionDomain};
use crate::verbs::memory::{LocalMemoryMut, ScatterBuffer, ScatterElement};
use crate::verbs::operation::{ReceiveWorkRequest, post_by};

object!(ibv_wq, ibv_destroy_wq, event_acks);

const CREATE: &str = "ibv_create_wq";
const MODIFY: &str = "ibv_modify_wq";
const POST: &str = "ibv_post_wq_recv";

/// `struct ibv_wq`: a receive queue that belongs to no queue pair.
///
/// Queue pairs reach it through an [`IndirectionTable`](crate::work_queue::IndirectionTable). Its completions have its
/// [`number`](Self::number) in place of a queue pair's.
///
/// ```no_run
/// # // not on Soft-RoCE alone: it has no work queues
/// use ibverbs::work_queue::{WorkQueue, Flags, State};
///
/// # fn main() -> ibverbs::Result<()> {
/// let context = ibverbs::open("mlx5_0")?;
/// let domain = context.alloc_pd()?;
/// let completions = context.create_cq(256)?;
/// let queue = WorkQueue::new(&domain, &completions, 256, 1, Flags::empty())?;
/// queue.modify(State::Ready)?;
/// let mut region = domain.allocate::<u8>(256 * 2048)?;
/// for slot in 0..256_usize {
///     let range = slot * 2048..(slot + 1) * 2048;
///     // SAFETY: the region is not touched until the completion of each slot was polled.
///     unsafe { queue.post_receive(&mut region, range, slot as u64)? };
/// }
/// # Ok(())
/// # }
/// ```
#[doc(alias = "ibv_wq")]
pub struct WorkQueue<'res> {
    raw: Handle<ffi::ibv_wq>,
    max_wr: u32,
    max_sge: u32,
    /// Held while the state changes: mlx5 does not lock then.
    changing: Mutex<()>,
    domain: DomainRef<'res>,
    queue: QueueRef<'res>,
}

resource! {
    /// `ibv_destroy_wq`: destroys the queue and reports a failure, which a drop ignores. Outstanding requests end
    /// without completion.
    ///
    /// # Errors
    ///
    /// The queue is then [leaked](crate::_guide::verbs#when-a-resource-cannot-be-destroyed), with its parents.
    ///
    ///  - `EBUSY`: a leaked table lists it.
    #[doc(alias = "ibv_destroy_wq")]
    WorkQueue<'res>: raw of ibv_wq, domain, queue
}

// Threads may share it: providers and `modify` lock, and callers of `post` exclude a change of state meanwhile.

impl<'res> WorkQueue<'res> {
    /// `ibv_create_wq`: creates a receive queue in [`Reset`](State::Reset), for at least `max_wr` requests of at least
    /// `max_sge` scatter elements.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: a number is 0, or more than the device allows
    ///    ([`DeviceAttributes::max_qp_wr`](crate::device::DeviceAttributes::max_qp_wr),
    ///    [`max_sge`](crate::device::DeviceAttributes::max_sge)), or the completion queue belongs to another context.
    ///  - `EOPNOTSUPP`, `ENOSYS`: the device has no work queues, or lacks an option.
    ///  - `ENOMEM`: the device has none left, or `RLIMIT_MEMLOCK` is too low.
    ///  - `EPERM`: the process may not receive raw packets (`CAP_NET_RAW`).
    #[doc(alias = "ibv_create_wq")]
    pub fn new(
        domain: impl Into<DomainRef<'res>>,
        queue: impl Into<QueueRef<'res>>,
        max_wr: u32,
        max_sge: u32,
        flags: Flags,
    ) -> Result<Self> {
        let (domain, queue) = (domain.into(), queue.into());
        let context = domain.context();
        let reason = "the completion queue belongs to another context";
        context.check_same(queue.context(), CREATE, reason)?;
        let device = context.query_device()?;
        let reason = "the device has no work queues";
        Error::unsupported_if(device.max_wq_type_rq() == 0, CREATE, reason)?;
        Error::within(CREATE, "max_wr", max_wr, 1, device.max_qp_wr())?;
        Error::within(CREATE, "max_sge", max_sge, 1, device.max_sge())?;
        let mut attributes = ffi::ibv_wq_init_attr {
            wq_type: ffi::ibv_wq_type::IBV_WQT_RQ,
            max_wr,
            max_sge,
            pd: domain.as_raw(),
            cq: queue.as_raw(),
            ..Default::default()
        };
        if !flags.is_empty() {
            attributes.comp_mask = ffi::ibv_wq_init_attr_mask::IBV_WQ_INIT_ATTR_FLAGS.0;
            attributes.create_flags = flags.bits();
        }
        // SAFETY: context, domain and completion queue are live, and kept; a queue that comes back is ours alone.
        let raw =
            unsafe { Handle::new(CREATE, ffi::ibv_create_wq(context.as_raw(), &mut attributes)) }?;
        let ffi::ibv_wq_init_attr { max_wr, max_sge, .. } = attributes;
        Ok(Self { raw, max_wr, max_sge, changing: Mutex::new(()), domain, queue })
    }

    /// `ibv_modify_wq`: changes the state.
    ///
    /// In [`Ready`](State::Ready) the queue receives. In [`Reset`](State::Reset), outstanding requests end without
    /// completions; in [`Error`](State::Error), they complete as flushed.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: there is no such transition. A failed queue must first be reset; one in RESET cannot fail.
    ///  - `EOPNOTSUPP`: the device has no work queues.
    ///  - `EIO`, `ENODEV`: the device is gone.
    #[doc(alias = "ibv_modify_wq")]
    pub fn modify(&self, to: State) -> Result<()> {
        let _changing = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        if !self.last_state().leads_to(to) {
            let reason = match to {
                State::Ready => "a failed work queue has to be reset before it is used",
                State::Error => "a work queue in RESET cannot be moved to ERR",
                _ => "there is no such state",
            };
            return Err(Error::invalid(MODIFY, reason));
        }
        self.change(ffi::ibv_wq_attr {
            attr_mask: ffi::ibv_wq_attr_mask::IBV_WQ_ATTR_STATE.0,
            wq_state: to.into(),
            ..Default::default()
        })
    }

    /// `ibv_modify_wq`: sets the options in `mask` to their values in `flags`.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: `flags` has options outside `mask`.
    ///  - `EOPNOTSUPP`: the device lacks an option or cannot change it: mlx5 changes only
    ///    [`CVLAN_STRIPPING`](Flags::CVLAN_STRIPPING), in [`Ready`](State::Ready).
    ///  - `EIO`, `ENODEV`: the device is gone.
    pub fn set_flags(&self, flags: Flags, mask: Flags) -> Result<()> {
        Error::invalid_if(!mask.contains(flags), MODIFY, "flags has options that are not in mask")?;
        let _changing = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        self.change(ffi::ibv_wq_attr {
            attr_mask: ffi::ibv_wq_attr_mask::IBV_WQ_ATTR_FLAGS.0,
            flags: flags.bits(),
            flags_mask: mask.bits(),
            ..Default::default()
        })
    }

    fn change(&self, mut attributes: ffi::ibv_wq_attr) -> Result<()> {
        // SAFETY: the queue is live, and the mask names the fields that are set.
        let returned = unsafe { ffi::ibv_modify_wq(self.as_raw(), &mut attributes) };
        ffi::status(MODIFY, returned)
    }

    fn last_state(&self) -> State {
        // SAFETY: the queue is live, and the caller holds the lock under which the state changes.
        unsafe { (*self.as_raw()).state }.into()
    }

    /// The state of the last change. A device that moves a queue to ERR raises
    /// [`WorkQueueFatal`](crate::device::AsyncEventKind::WorkQueueFatal).
    pub fn state(&self) -> State {
        let _changing = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        self.last_state()
    }

    /// `ibv_post_wq_recv`: posts a receive that completes as `wr_id`.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the request has more elements than the queue allows.
    ///  - `ENOMEM`: the queue is full ([`QueueFull`](crate::ErrorKind::QueueFull)).
    ///  - `EIO`: the device is gone.
    ///
    /// # Safety
    ///
    /// [That of posting](crate::QueuePair#the-contract-of-posting). A request ends when its completion was polled, or
    /// the queue was moved to [`Reset`](State::Reset) or destroyed ([`close`](Self::close) has returned `Ok`). No other
    /// thread changes the state or options of the queue meanwhile.
    #[doc(alias = "ibv_post_wq_recv")]
    #[inline]
    pub unsafe fn post<D: ScatterBuffer>(
        &self,
        request: ReceiveWorkRequest<D>,
        wr_id: u64,
    ) -> Result<()> {
        // SAFETY: the queue is live, and the caller keeps the contract.
        let post =
            |request: *mut _, bad| unsafe { ffi::ibv_post_wq_recv(self.as_raw(), request, bad) };
        post_by(POST, post, &self.domain, self.max_sge, request, wr_id)
    }

    /// `ibv_post_wq_recv`: receives one packet into the elements of `region` in `range`.
    ///
    /// # Errors
    ///
    /// Those of [`post`](Self::post), and
    ///
    ///  - `EINVAL`: the range is out of bounds, or longer than 4 GiB - 1 bytes.
    ///
    /// # Safety
    ///
    /// That of [`post`](Self::post).
    #[inline]
    pub unsafe fn post_receive(
        &self,
        region: &mut impl LocalMemoryMut,
        range: impl RangeBounds<usize>,
        wr_id: u64,
    ) -> Result<()> {
        let element = ScatterElement::new(region.sge_mut(range)?);
        // SAFETY: the caller keeps the contract.
        unsafe { self.post(ReceiveWorkRequest::new(element), wr_id) }
    }

    /// Its number in completions and [`AsyncEvents`](crate::device::AsyncEvents).
    pub fn number(&self) -> u32 {
        // SAFETY: the queue is live.
        unsafe { (*self.as_raw()).wq_num }
    }

    getters! { self,
        /// How many requests can be outstanding: at least as many as asked for.
        max_wr: u32 => self.max_wr;

        /// How many scatter elements a request can have: at least as many as asked for.
        max_sge: u32 => self.max_sge;

        /// The domain that it was created in.
        protection_domain: &ProtectionDomain<'res> => &self.domain;

        /// The queue on which its receives complete.
        completion_queue: &CompletionQueue<'res> => &self.queue;
    }
}

debug! {
    WorkQueue<'_>, self,
    number: self.number(), max_wr: self.max_wr, max_sge: self.max_sge, ..
}

c_enum! {
    /// `enum ibv_wq_state`: the state of a work queue.
    #[doc(alias = "ibv_wq_state")]
    pub enum State: ibv_wq_state(u32), "state" {
        /// New, or reset: it receives nothing.
        Reset = IBV_WQS_RESET, "RESET";
        /// The work queue receives.
        Ready = IBV_WQS_RDY, "RDY";
        /// Failed, or moved here: receives complete as [`Flushed`](crate::WorkStatus::Flushed).
        Error = IBV_WQS_ERR, "ERR";
    }
}

impl State {
    pub(super) fn leads_to(self, to: Self) -> bool {
        !matches!(
            (self, to),
            (Self::Unknown(_), _)
                | (_, Self::Unknown(_))
                | (Self::Reset, Self::Error)
                | (Self::Error, Self::Ready)
        )
    }
}

bitflags::bitflags! {
    /// `enum ibv_wq_flags`: options of a work queue that few devices have.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
    #[doc(alias = "ibv_wq_flags")]
    pub struct Flags: u32 {
        /// Removes the VLAN tag of an Ethernet frame, and reports it in the completion.
        const CVLAN_STRIPPING = ffi::ibv_wq_flags::IBV_WQ_FLAGS_CVLAN_STRIPPING.0;
        /// Receives the checksum of an Ethernet frame with it.
        const SCATTER_FCS = ffi::ibv_wq_flags::IBV_WQ_FLAGS_SCATTER_FCS.0;
        /// A packet that finds no receive waits before it is dropped.
        const DELAY_DROP = ffi::ibv_wq_flags::IBV_WQ_FLAGS_DELAY_DROP.0;
        /// Pads writes to memory to whole cache lines.
        const PCI_WRITE_END_PADDING = ffi::ibv_wq_flags::IBV_WQ_FLAGS_PCI_WRITE_END_PADDING.0;
    }
}

object!(ibv_rwq_ind_table, ibv_destroy_rwq_ind_table);

const VERB: &str = "ibv_create_rwq_ind_table";

/// `struct ibv_rwq_ind_table`: the work queues over which a
/// [`ReceiveScalingQueuePair`](crate::work_queue::ReceiveScalingQueuePair) spreads packets.
#[doc(alias = "ibv_rwq_ind_table")]
pub struct IndirectionTable<'res> {
    raw: Handle<ffi::ibv_rwq_ind_table>,
    queues: Vec<Parent<'res, WorkQueue<'res>>>,
}

resource! {
    /// `ibv_destroy_rwq_ind_table`: destroys the table and reports a failure, which a drop ignores.
    ///
    /// # Errors
    ///
    /// The table is then [leaked](crate::_guide::verbs#when-a-resource-cannot-be-destroyed), with its queues.
    ///
    ///  - `EBUSY`: a leaked queue pair uses it.
    #[doc(alias = "ibv_destroy_rwq_ind_table")]
    IndirectionTable<'res>: raw of ibv_rwq_ind_table, queues
}

impl<'res> IndirectionTable<'res> {
    /// `ibv_create_rwq_ind_table`: creates a table of these queues, in this order. Their number is a power of two; a
    /// queue may repeat.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the number of queues is 0, no power of two, or more than the device allows
    ///    ([`ReceiveScalingCapabilities::max_rwq_indirection_table_size`](crate::device::ReceiveScalingCapabilities::max_rwq_indirection_table_size));
    ///    or they belong to different contexts.
    ///  - `EOPNOTSUPP`, `ENOSYS`: the device has no such tables.
    ///  - `ENOMEM`: the device has none left.
    #[doc(alias = "ibv_create_rwq_ind_table")]
    pub fn new<Q: Into<Parent<'res, WorkQueue<'res>>>>(
        queues: impl IntoIterator<Item = Q>,
    ) -> Result<Self> {
        let mut list = queues.into_iter().map(Into::into);
        let Some(first) = list.next() else {
            return Err(Error::invalid(VERB, "there are no work queues"));
        };
        let device = first.protection_domain().context().query_device()?;
        let most = device.receive_scaling().max_rwq_indirection_table_size;
        let mut queues = vec![first];
        // The list may be endless.
        queues.extend(list.take(most as usize));
        Error::within(VERB, "the number of work queues", queues.len() as u64, 1, most)?;
        let reason = "the number of work queues is not a power of two";
        Error::invalid_if(!queues.len().is_power_of_two(), VERB, reason)?;
        let context = queues[0].protection_domain().context();
        for queue in &queues {
            let reason = "the work queues belong to different contexts";
            context.check_same(queue.protection_domain().context(), VERB, reason)?;
        }
        let mut raw: Vec<*mut ffi::ibv_wq> = queues.iter().map(|queue| queue.as_raw()).collect();
        let mut attributes = ffi::ibv_rwq_ind_table_init_attr {
            log_ind_tbl_size: raw.len().trailing_zeros(),
            ind_tbl: raw.as_mut_ptr(),
            comp_mask: 0,
        };
        // SAFETY: context and queues are live, and kept; the list has the length that the attributes say; the
        // table is ours alone.
        let raw = unsafe {
            Handle::new(
                VERB,
                ffi::ibv_create_rwq_ind_table(context.as_raw(), ptr::from_mut(&mut attributes)),
            )
        }?;
        Ok(Self { raw, queues })
    }

    /// Its queues.
    pub fn work_queues(&self) -> impl ExactSizeIterator<Item = &WorkQueue<'res>> {
        self.queues.iter().map(|queue| &**queue)
    }

    /// Its number.
    pub fn number(&self) -> i32 {
        // SAFETY: the table is live.
        unsafe { (*self.as_raw()).ind_tbl_num }
    }

    /// The context that it was created on.
    pub fn context(&self) -> &Context<'res> {
        self.queues[0].protection_domain().context()
    }
}

impl fmt::Debug for IndirectionTable<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.queues.iter().map(|queue| queue.number())).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::State as S;

    #[test]
    fn a_failed_queue_is_reset_before_it_is_used_again() {
        for (from, to, possible) in [
            (S::Reset, S::Ready, true),
            (S::Ready, S::Error, true),
            (S::Ready, S::Reset, true),
            (S::Error, S::Reset, true),
            (S::Error, S::Ready, false),
            (S::Reset, S::Error, false),
            (S::Ready, S::Unknown(3), false),
        ] {
            assert_eq!(from.leads_to(to), possible, "{from} to {to}");
        }
    }
}
