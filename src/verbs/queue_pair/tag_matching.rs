//! Shared receive queues with tag matching.

use std::ffi::c_int;
use std::ptr;

use super::shared_receive_queue::{Extended, SharedReceiveQueue, check};
use crate::base::{Error, Result, ffi};
use crate::verbs::completion::QueueRef;
use crate::verbs::domain::DomainRef;
use crate::verbs::memory::ScatterElement;

const CREATE: &str = "ibv_create_srq_ex";
const POST: &str = "ibv_post_srq_ops";

/// `struct ibv_tm_cap`: the size of the tag list of a shared receive queue.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[doc(alias = "ibv_tm_cap")]
pub struct TagListSize {
    /// How many tagged receives the list holds.
    pub max_tags: u32,
    /// How many operations on the list can be outstanding.
    pub max_operations: u32,
}

/// A receive in the tag list, for [`SharedReceiveQueue::post_tag_remove`](crate::SharedReceiveQueue::post_tag_remove).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct TagHandle(u32);

/// A tag with a mask: a message matches if its tag has the same value in the bits of `mask`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Tag {
    /// The value; 0 outside `mask`.
    pub value: u64,
    /// The bits that count.
    pub mask: u64,
}

/// The completion of an operation on the tag list, and what it tells the device.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct TagOperation {
    /// The number of the completion.
    pub wr_id: u64,
    /// The operation has a completion.
    pub signaled: bool,
    /// Tells the device how many unexpected messages the program has handled so far, modulo 2³².
    pub unexpected: Option<u32>,
}

impl TagOperation {
    /// An operation that completes as `wr_id`, and tells the device nothing.
    pub fn new(wr_id: u64) -> Self {
        Self { wr_id, signaled: true, unexpected: None }
    }

    fn to_raw(self, opcode: ffi::ibv_ops_wr_opcode) -> ffi::ibv_ops_wr {
        let mut flags = 0;
        if self.signaled {
            flags |= ffi::ibv_ops_flags::IBV_OPS_SIGNALED.0;
        }
        if self.unexpected.is_some() {
            flags |= ffi::ibv_ops_flags::IBV_OPS_TM_SYNC.0;
        }
        let mut raw = ffi::ibv_ops_wr { wr_id: self.wr_id, opcode, ..Default::default() };
        raw.flags = flags as c_int;
        raw.tm.unexpected_cnt = self.unexpected.unwrap_or(0);
        raw
    }
}

/// Tag matching: the device chooses the receive of a message by a tag in its header.
///
/// A message that matches no tag is *unexpected*, and goes to a receive of [`post`](SharedReceiveQueue::post). The
/// program tells the device how many of these it has handled. See `ibv_post_srq_ops(3)`, and
/// [`DeviceAttributes::tag_matching`](crate::device::DeviceAttributes::tag_matching) for the limits.
impl<'pd> SharedReceiveQueue<'pd> {
    /// `ibv_create_srq_ex`: creates a shared receive queue with a tag list. Its operations and messages complete on
    /// `queue`.
    ///
    /// # Errors
    ///
    /// Those of [`new`](Self::new), and
    ///
    ///  - `EINVAL`: the completion queue belongs to another context, or a size of the list is 0 or more than the device
    ///    allows.
    ///  - `EOPNOTSUPP`: the device has no tag matching.
    #[doc(alias = "ibv_create_srq_ex")]
    pub fn with_tag_matching(
        domain: impl Into<DomainRef<'pd>>,
        queue: impl Into<QueueRef<'pd>>,
        max_wr: u32,
        max_sge: u32,
        size: TagListSize,
    ) -> Result<Self> {
        let (domain, queue) = (domain.into(), queue.into());
        let context = domain.context();
        let reason = "the completion queue belongs to another context";
        context.check_same(queue.context(), CREATE, reason)?;
        check(CREATE, &domain, max_wr, max_sge)?;
        let limits = context.query_device()?.tag_matching();
        Error::unsupported_if(limits.max_tags == 0, CREATE, "the device has no tag matching")?;
        Error::within(CREATE, "max_tags", size.max_tags, 1, limits.max_tags)?;
        Error::within(CREATE, "max_operations", size.max_operations, 1, limits.max_operations)?;
        let attributes = ffi::ibv_srq_init_attr_ex {
            comp_mask: ffi::ibv_srq_init_attr_mask::IBV_SRQ_INIT_ATTR_TM.0,
            srq_type: ffi::ibv_srq_type::IBV_SRQT_TM,
            tm_cap: ffi::ibv_tm_cap { max_num_tags: size.max_tags, max_ops: size.max_operations },
            ..Default::default()
        };
        let extended = Extended { domain: None, queue, max_tag_sge: limits.max_sge };
        Self::create(domain, extended, max_wr, max_sge, attributes)
    }

    /// `ibv_post_srq_ops` (`IBV_WR_TAG_ADD`): adds a receive to the tag list. The message that matches completes as
    /// `receive_wr_id`.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the queue has no tag list, the tag has bits outside its mask, or there are more elements than the
    ///    device allows.
    ///  - `ENOMEM`: the list is full, or too many operations are outstanding
    ///    ([`QueueFull`](crate::ErrorKind::QueueFull)).
    ///  - `EIO`: the device is gone.
    ///
    /// # Safety
    ///
    /// [That of posting](crate::QueuePair#the-contract-of-posting), for the memory of `elements` until the receive has
    /// completed or was removed, and for the numbers of the receive and of the operation.
    #[doc(alias = "ibv_post_srq_ops")]
    pub unsafe fn post_tag_add(
        &self,
        tag: Tag,
        elements: &mut [ScatterElement<'_>],
        receive_wr_id: u64,
        operation: TagOperation,
    ) -> Result<TagHandle> {
        let most = self.max_tag_sge()?;
        let reason = "the tag has bits that are not in its mask";
        Error::invalid_if(tag.value & !tag.mask != 0, POST, reason)?;
        let count = elements.len() as u64;
        Error::within(POST, "the number of scatter elements", count, 0, most)?;
        let mut raw = operation.to_raw(ffi::ibv_ops_wr_opcode::IBV_WR_TAG_ADD);
        raw.tm.add.recv_wr_id = receive_wr_id;
        raw.tm.add.sg_list = elements.as_mut_ptr().cast();
        raw.tm.add.num_sge = c_int::try_from(elements.len()).unwrap_or(c_int::MAX);
        (raw.tm.add.tag, raw.tm.add.mask) = (tag.value, tag.mask);
        // SAFETY: the elements are a C list of that length; the caller keeps the memory.
        unsafe { self.post_operation(&mut raw) }?;
        Ok(TagHandle(raw.tm.handle))
    }

    /// `ibv_post_srq_ops` (`IBV_WR_TAG_DEL`): removes a receive from the tag list. If a message has taken it meanwhile,
    /// the operation completes with [`TagMatching`](crate::WorkStatus::TagMatching).
    ///
    /// # Errors
    ///
    /// Those of [`post_tag_add`](Self::post_tag_add), except about tag and elements.
    ///
    /// # Safety
    ///
    /// The handle is from [`post_tag_add`](Self::post_tag_add) of this queue. Its receive was not removed, and its
    /// completion not polled. The operation's number differs from all that are outstanding.
    #[doc(alias = "ibv_post_srq_ops")]
    pub unsafe fn post_tag_remove(&self, handle: TagHandle, operation: TagOperation) -> Result<()> {
        self.max_tag_sge()?;
        let mut raw = operation.to_raw(ffi::ibv_ops_wr_opcode::IBV_WR_TAG_DEL);
        raw.tm.handle = handle.0;
        // SAFETY: the caller vouches for the handle.
        unsafe { self.post_operation(&mut raw) }
    }

    /// `ibv_post_srq_ops` (`IBV_WR_TAG_SYNC`): tells the device how many unexpected messages the program has handled,
    /// and leaves the list as it is.
    ///
    /// # Errors
    ///
    /// Those of [`post_tag_add`](Self::post_tag_add), and
    ///
    ///  - `EINVAL`: the operation does not say how many [messages](TagOperation::unexpected) were handled.
    ///
    /// # Safety
    ///
    /// The operation's number differs from all that are outstanding.
    #[doc(alias = "ibv_post_srq_ops")]
    pub unsafe fn post_tag_sync(&self, operation: TagOperation) -> Result<()> {
        self.max_tag_sge()?;
        let reason = "the operation has no number of unexpected messages";
        Error::invalid_if(operation.unexpected.is_none(), POST, reason)?;
        let mut raw = operation.to_raw(ffi::ibv_ops_wr_opcode::IBV_WR_TAG_SYNC);
        // SAFETY: the operation refers to no memory.
        unsafe { self.post_operation(&mut raw) }
    }

    fn max_tag_sge(&self) -> Result<u32> {
        match &self.extended {
            Some(Extended { domain: None, max_tag_sge, .. }) => Ok(*max_tag_sge),
            _ => Err(Error::invalid(POST, "the shared receive queue has no list of tags")),
        }
    }

    /// # Safety
    ///
    /// The operation is well-formed, and the caller keeps the contract of the method that posts it.
    unsafe fn post_operation(&self, operation: &mut ffi::ibv_ops_wr) -> Result<()> {
        let mut bad = ptr::null_mut();
        // SAFETY: the queue is live, `bad` is writable, and the caller vouches for the rest.
        let returned = unsafe { ffi::ibv_post_srq_ops(self.as_raw(), operation, &mut bad) };
        ffi::status(POST, returned)
    }
}
