use std::ffi::c_int;
use std::ops::RangeBounds;
use std::ptr;

use super::Receive;
use super::prepared_request::{PostedBy, RawRequest, TakesPrepared};
use super::sealed::Request;
use crate::base::{Error, Result, err_from_call, ffi};
use crate::verbs::domain::ProtectionDomain;
use crate::verbs::memory::{
    GatherElement, LocalMemory, LocalMemoryMut, RemoteMemoryRegion, ScatterBuffer, ScatterElement,
};
use crate::verbs::operation::sealed::Post;
use crate::verbs::operation::{
    Batch, ListError, Posts, Prepared, PreparedReceive, ReadWorkRequest, ReceiveList,
    ReceiveWorkRequest, SendList, SendWorkRequest, WriteWorkRequest,
};
use crate::verbs::queue_pair::{
    FixedPeer, MessageLimits, PostsRdma, QueuePair, Reads, ReceiveQueue, Sends, SharedReceiveQueue,
    Transport, Writes,
};

impl<T: Transport> QueuePair<'_, T> {
    /// `ibv_post_send`, `ibv_post_recv`: posts a request, under the number `wr_id`, to the queue that it is for.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the request has more pieces or more inline data than the queue pair was built for, or is longer
    ///    than the port's [`max_message_size`](crate::device::PortAttributes::max_message_size) (a datagram: than the
    ///    MTU when the queue pair was built); the peer's memory is too short, or not aligned for an atomic; the queue
    ///    pair has no fixed peer (UD, XRC), and the request no [destination](crate::SendWorkRequest::to); or the queue
    ///    pair's type or state does not allow it.
    ///  - `EINVAL`, in debug builds: the memory is registered in another protection domain or on another device. Release
    ///    builds do not look: there the request completes with an error.
    ///  - `ENOMEM`: the queue is full ([`QueueFull`](crate::ErrorKind::QueueFull)).
    ///  - `EIO`: the device is gone.
    ///  - `EACCES` (Soft-RoCE and Soft-iWARP): the process changed its credentials after it opened the device.
    ///
    /// # Safety
    ///
    /// [That of posting](QueuePair#the-contract-of-posting). A [destination](crate::SendWorkRequest::to) is of the kind
    /// that this type of queue pair needs.
    #[doc(alias = "ibv_post_send")]
    #[doc(alias = "ibv_post_recv")]
    #[inline(always)]
    pub unsafe fn post<R: Posts<T>>(&mut self, request: R, wr_id: u64) -> Result<()> {
        // SAFETY: the queue pair is live, and the caller keeps the contract.
        unsafe { post(self, self.as_raw(), request, wr_id) }
    }

    /// `ibv_post_send`, `ibv_post_recv`: posts a prepared request under the number `wr_id`.
    ///
    /// # Errors
    ///
    /// Those of [`post`](Self::post).
    ///
    /// # Safety
    ///
    /// That of [`post`](Self::post). The request was never an entry of a [list](crate::operation::WorkRequestList),
    /// which links it to the next one.
    ///
    /// The elements and the request itself may be dropped immediately.
    #[inline(always)]
    pub unsafe fn post_prepared<R: PostedBy<T>, F>(
        &mut self,
        request: &mut Prepared<'_, R, F>,
        wr_id: u64,
    ) -> Result<()>
    where
        R::For: TakesPrepared<F>,
    {
        // SAFETY: the caller keeps the contract.
        unsafe { request.post(self, self.as_raw(), wr_id) }
    }

    send_methods!();
    receive_methods!();

    pub(super) fn queue_pair(&self) -> &Self {
        self
    }
}

/// # Safety
///
/// `raw` is that of `queue_pair`, and the caller keeps the contract of posting.
#[inline(always)]
pub(super) unsafe fn post<T: Transport, R: Posts<T>>(
    queue_pair: &QueuePair<'_, T>,
    raw: *mut ffi::ibv_qp,
    request: R,
    wr_id: u64,
) -> Result<()> {
    if <R::Operation as Post>::NEEDS_PEER {
        T::need_peer(queue_pair.has_peer())?;
    }
    let (operation, mut buffer) = request.split();
    let limits = queue_pair.message_limits();
    let mut list = match R::list(&mut buffer) {
        Ok(list) => list,
        Err(error) => return err_from_call(R::Operation::explain_buffer(limits, error)),
    };
    let list = list.as_mut();
    operation.check(limits, list)?;
    // SAFETY: the queue pair is live. The buffer lives during the call; the caller keeps its memory.
    let returned = unsafe { operation.post(raw, wr_id, list) };
    if returned == 0 { Ok(()) } else { Err(operation.explain(queue_pair.erased(), list, returned)) }
}

/// Both store the pointer directly; the queue pair has the rest.
macro_rules! send_methods {
    () => {
        /// `ibv_post_send`: sends `range` of `region` as one message, with a completion: [`post`](Self::post) of a
        /// [`SendWorkRequest`](crate::SendWorkRequest).
        ///
        /// # Errors
        ///
        /// Those of [`post`](Self::post), and `EINVAL`: the range is out of bounds.
        ///
        /// # Safety
        ///
        /// [That of posting](QueuePair#the-contract-of-posting).
        #[inline]
        pub unsafe fn post_send(
            &mut self,
            region: &impl LocalMemory,
            range: impl RangeBounds<usize>,
            wr_id: u64,
        ) -> Result<()>
        where
            T: Sends + FixedPeer,
        {
            let element = GatherElement::new(region.sge(range)?);
            // SAFETY: the caller keeps the contract.
            unsafe { self.post(SendWorkRequest::new(element), wr_id) }
        }

        /// `ibv_post_send`: writes `range` of `region` to the beginning of `remote`, with a completion:
        /// [`post`](Self::post) of a [`WriteWorkRequest`](crate::WriteWorkRequest).
        ///
        /// # Errors
        ///
        /// Those of [`post_send`](Self::post_send).
        ///
        /// # Safety
        ///
        /// [That of posting](QueuePair#the-contract-of-posting).
        #[inline]
        pub unsafe fn post_write(
            &mut self,
            region: &impl LocalMemory,
            range: impl RangeBounds<usize>,
            remote: impl Into<RemoteMemoryRegion>,
            wr_id: u64,
        ) -> Result<()>
        where
            T: Writes + PostsRdma + FixedPeer,
        {
            let element = GatherElement::new(region.sge(range)?);
            // SAFETY: the caller keeps the contract.
            unsafe { self.post(WriteWorkRequest::new(element, remote), wr_id) }
        }

        /// `ibv_post_send`: reads the beginning of `remote` into `range` of `region`, with a completion:
        /// [`post`](Self::post) of a [`ReadWorkRequest`](crate::ReadWorkRequest).
        ///
        /// # Errors
        ///
        /// Those of [`post_send`](Self::post_send).
        ///
        /// # Safety
        ///
        /// [That of posting](QueuePair#the-contract-of-posting).
        #[inline]
        pub unsafe fn post_read(
            &mut self,
            region: &mut impl LocalMemoryMut,
            range: impl RangeBounds<usize>,
            remote: impl Into<RemoteMemoryRegion>,
            wr_id: u64,
        ) -> Result<()>
        where
            T: Reads + PostsRdma + FixedPeer,
        {
            let element = ScatterElement::new(region.sge_mut(range)?);
            // SAFETY: the caller keeps the contract.
            unsafe { self.post(ReadWorkRequest::new(element, remote), wr_id) }
        }

        /// `ibv_post_send`: posts the requests of a list with one call, in order.
        ///
        /// # Errors
        ///
        /// Those of [`post`](Self::post), for the first request that was refused. The [`ListError::posted`] requests
        /// before it were posted.
        ///
        /// # Safety
        ///
        /// That of [`post`](Self::post), for each request of the list, even if this fails.
        #[doc(alias = "ibv_post_send")]
        #[inline]
        pub unsafe fn post_list<F>(&mut self, list: &mut SendList<'_, F>) -> Result<(), ListError>
        where
            T: TakesPrepared<F>,
        {
            if list.needs_peer {
                let refused = |error| ListError::new(error, 0, list.len());
                T::need_peer(self.queue_pair().has_peer()).map_err(refused)?;
            }
            if list.has_long {
                let limits = self.queue_pair().message_limits();
                let refused = |error| ListError::new(error, 0, list.len());
                limits.check_message(list.longest()).map_err(refused)?;
            }
            // SAFETY: the caller keeps the memory until completion.
            unsafe { list.check_domain(self.queue_pair().message_limits())? };
            let (first, bad) = list.as_raw();
            // SAFETY: the queue pair is live, the list well-formed; the caller keeps the memory until completion.
            let returned = unsafe { ffi::ibv_post_send(self.as_raw(), first, bad) };
            // siw returns 0 when it posts a part of a list, but names the first refused request.
            // SAFETY: the list owns the pointer, which was null before the call.
            if returned == 0 && unsafe { (*bad).is_null() } {
                return Ok(());
            }
            let (posted, request) = list.failed();
            let error = request.explain(self.queue_pair().erased(), returned);
            Err(ListError::new(error, posted, list.len()))
        }

        /// `ibv_wr_start`, `ibv_wr_complete`: posts all requests that `build` adds to a [`Batch`], or none of them.
        ///
        /// A queue pair [built for it](crate::QueuePairBuilder::extended) uses the extended posting interface. Other
        /// queue pairs collect the requests, which allocates memory, and post them as one list by `ibv_post_send`,
        /// without segmented sends, flushes and atomic writes. If the device then refuses a request, those before it
        /// were posted.
        ///
        /// If `build` fails or panics, nothing is posted. If the device refuses a request of the extended interface,
        /// most devices post none; Soft-RoCE may queue all (see [the contract](QueuePair#the-contract-of-posting)).
        ///
        /// While `build` runs, the send queue is locked, and on EFA the completion queues too. If `build` polls them or
        /// posts to this queue pair, it may wait for ever.
        ///
        /// ```
        /// use ibverbs::queue_pair::SendOperations;
        /// use ibverbs::{Inline, Rc, SendWorkRequest};
        ///
        /// # fn main() -> ibverbs::Result<()> {
        /// # let rxe0 = ibverbs_software::Device::builder().name("rxe0").build().unwrap();
        /// # rxe0.register();
        /// # let context = ibverbs::open("rxe0")?;
        /// # let domain = context.alloc_pd()?;
        /// # let queue = context.create_cq(16)?;
        /// let region = domain.allocate::<u8>(1024)?;
        /// let prepared = domain
        ///     .create_qp(&queue, &queue, Rc)
        ///     .max_send_wr(16)
        ///     .max_inline_data(32)
        ///     .extended(SendOperations::SEND)
        ///     .build()?;
        /// # let remote = prepared.endpoint();
        /// let mut queue_pair = prepared.handshake(remote)?;
        ///
        /// let body = region.gather_element(..)?;
        /// // SAFETY: the region is not written until the completion of 2 was polled, and dropped after
        /// // the queue pair.
        /// unsafe {
        ///     queue_pair.batch(|batch| {
        ///         batch.add(SendWorkRequest::new(Inline(b"header")).unsignaled(), 1)?;
        ///         batch.add(SendWorkRequest::new(body), 2)
        ///     })?;
        /// }
        /// # Ok(())
        /// # }
        /// ```
        ///
        /// # Errors
        ///
        ///  - `EOPNOTSUPP`, from [`Batch::add`]: the queue pair was not built for the operation.
        ///  - `ENOMEM`: the send queue has no room for all of them ([`QueueFull`](crate::ErrorKind::QueueFull)).
        ///  - `EINVAL`: the device refuses one of them.
        ///  - `EACCES`, `EIO` (Soft-RoCE): the process changed its credentials after it opened the device, or the
        ///    device is gone.
        ///  - The error that `build` returns. It may be any type that an [`Error`](crate::Error) converts to.
        ///
        /// # Safety
        ///
        /// [That of posting](QueuePair#the-contract-of-posting), for each request, even if this fails after `build` has
        /// returned `Ok`.
        #[doc(alias = "ibv_wr_start")]
        #[doc(alias = "ibv_wr_complete")]
        #[doc(alias = "ibv_wr_abort")]
        #[inline]
        pub unsafe fn batch<V, E: From<Error>>(
            &mut self,
            build: impl FnOnce(&mut Batch<'_, T>) -> Result<V, E>,
        ) -> Result<V, E> {
            // SAFETY: the caller keeps the contract.
            unsafe { Batch::run(self.queue_pair().erased(), build) }
        }
    };
}

pub(super) use send_methods;

macro_rules! receive_methods {
    () => {
        /// `ibv_post_recv`: receives one message into `range` of `region`: [`post`](Self::post) of a
        /// [`ReceiveWorkRequest`](crate::ReceiveWorkRequest).
        ///
        /// # Errors
        ///
        /// Those of [`post`](Self::post), and `EINVAL`, which says the cause: the range is out of bounds, or longer
        /// than 4 GiB - 1 bytes; the queue pair is in RESET or has a shared receive queue.
        ///
        /// # Safety
        ///
        /// [That of posting](QueuePair#the-contract-of-posting).
        #[inline]
        pub unsafe fn post_receive(
            &mut self,
            region: &mut impl LocalMemoryMut,
            range: impl RangeBounds<usize>,
            wr_id: u64,
        ) -> Result<()>
        where
            T: ReceiveQueue,
        {
            let element = ScatterElement::new(region.sge_mut(range)?);
            // SAFETY: the caller keeps the contract.
            unsafe { self.post(ReceiveWorkRequest::new(element), wr_id) }
        }

        /// `ibv_post_recv`: posts the receives of a list with one call, in order.
        ///
        /// # Errors
        ///
        /// Those of [`post_receive`](Self::post_receive), for the first receive that was refused. The
        /// [`ListError::posted`] receives before it were posted.
        ///
        /// # Safety
        ///
        /// [That of posting](QueuePair#the-contract-of-posting), for each receive of the list, even if this fails.
        #[doc(alias = "ibv_post_recv")]
        #[inline]
        pub unsafe fn post_receive_list(
            &mut self,
            list: &mut ReceiveList<'_>,
        ) -> Result<(), ListError>
        where
            T: ReceiveQueue,
        {
            // SAFETY: the caller keeps the memory until completion.
            unsafe { list.check_domain(self.queue_pair().message_limits())? };
            let (first, bad) = list.as_raw();
            // SAFETY: the queue pair is live, the list well-formed; the caller keeps the memory until completion.
            let returned = unsafe { ffi::ibv_post_recv(self.as_raw(), first, bad) };
            if returned == 0 {
                return Ok(());
            }
            let (posted, request) = list.failed();
            let error = request.explain(self.queue_pair().erased(), returned);
            Err(ListError::new(error, posted, list.len()))
        }

        /// `ibv_post_recv`: posts receives, each under its own number, with one call and in order.
        ///
        /// This allocates a vector. To avoid that, keep a [`ReceiveList`] for
        /// [`post_receive_list`](Self::post_receive_list).
        ///
        /// # Errors
        ///
        /// Those of [`post_receive_list`](Self::post_receive_list), and `EINVAL`: there are no receives.
        ///
        /// # Safety
        ///
        /// That of [`post_receive_list`](Self::post_receive_list).
        pub unsafe fn post_receives<'wr>(
            &mut self,
            receives: impl IntoIterator<Item = (u64, PreparedReceive<'wr>)>,
        ) -> Result<(), ListError>
        where
            T: ReceiveQueue,
        {
            let mut entries = PreparedReceive::collect(receives);
            let mut list =
                ReceiveList::new(&mut entries).map_err(|error| ListError::new(error, 0, 0))?;
            // SAFETY: the caller keeps the contract.
            unsafe { self.post_receive_list(&mut list) }
        }
    };
}

pub(super) use receive_methods;

const POST: &str = "ibv_post_srq_recv";

/// `verb` gets a well-formed request; the buffer lives during the call, and the caller keeps its memory after that.
#[inline]
pub(crate) fn post_by<D: ScatterBuffer>(
    verb: &'static str,
    post: impl FnOnce(*mut ffi::ibv_recv_wr, *mut *mut ffi::ibv_recv_wr) -> c_int,
    domain: &ProtectionDomain<'_>,
    most: u32,
    request: ReceiveWorkRequest<D>,
    wr_id: u64,
) -> Result<()> {
    let (_, mut buffer) = request.split();
    let mut list = buffer.scatter()?;
    let list = list.as_mut();
    MessageLimits::UNKNOWN.of_domain(domain).check_domain(verb, list)?;
    let mut bad = ptr::null_mut();
    let returned = post(&mut Receive::encode(wr_id, list), &mut bad);
    if returned == 0 {
        return Ok(());
    }
    let (count, most) = (list.len() as u64, most.into());
    if count > most {
        return Err(Error::out_of_range(verb, "the number of scatter elements", count, 0, most));
    }
    Err(ffi::failed(verb, returned))
}

impl SharedReceiveQueue<'_> {
    /// `ibv_post_srq_recv`: posts a receive under the number `wr_id`.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the request has more elements than the queue was created for.
    ///  - `EINVAL`, in debug builds: the memory is registered in another protection domain or on another device. Release
    ///    builds do not look: there the receive completes with an error.
    ///  - `ENOMEM`: the queue is full ([`QueueFull`](crate::ErrorKind::QueueFull)).
    ///  - `EIO`: the device is gone.
    ///
    /// # Safety
    ///
    /// [That of posting](crate::QueuePair#the-contract-of-posting). A request ends when its completion was polled, or
    /// the shared receive queue was destroyed ([`close`](Self::close) has returned `Ok`). Destroying a queue pair does
    /// not end it.
    #[doc(alias = "ibv_post_srq_recv")]
    #[inline]
    pub unsafe fn post<D: ScatterBuffer>(
        &self,
        request: ReceiveWorkRequest<D>,
        wr_id: u64,
    ) -> Result<()> {
        // SAFETY: the queue is live, and the caller keeps the contract.
        let post =
            |request: *mut _, bad| unsafe { ffi::ibv_post_srq_recv(self.as_raw(), request, bad) };
        post_by(POST, post, self.protection_domain(), self.max_sge(), request, wr_id)
    }

    /// `ibv_post_srq_recv`: receives one message, from any of the queue pairs, into `range` of `region`.
    ///
    /// # Errors
    ///
    /// Those of [`post`](Self::post), and `EINVAL`: the range is out of bounds, or longer than 4 GiB - 1 bytes.
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
}
