//! Posting to queue pairs.

use std::mem::MaybeUninit;
use std::ops::RangeBounds;
use std::ptr;

use super::QueuePair;
use super::halves::{ReceiveHalf, SendHalf};
use crate::error::{Error, Result};
use crate::ffi;
use crate::memory::sge;
use crate::memory::{LocalMemory, LocalMemoryMut, RemoteMemoryRegion};
use crate::queue_pair::work_request::remote::{check_remote, rdma};
use crate::queue_pair::work_request::{
    Batch, ListError, ReceiveList, ReceiveListEntry, SendList, SendListEntry, WorkRequest,
};
use crate::queue_pair::work_request::{
    explain_elements, explain_receive, explain_send, post_receive, post_send, too_long_inline,
};

pub(super) const SIGNALED: u32 = ffi::ibv_send_flags::IBV_SEND_SIGNALED.0;
pub(super) const INLINE: u32 = ffi::ibv_send_flags::IBV_SEND_INLINE.0;

/// A request with one element, or with none if that is empty: mlx4 and mthca interpret 0 bytes as 2 GiB.
/// Only the fields that every opcode has are set. The others stay uninitialised: zeroing them would
/// dominate the cost.
#[inline]
pub(super) fn request(
    wr_id: u64,
    sge: &mut ffi::ibv_sge,
    opcode: ffi::ibv_wr_opcode,
    send_flags: u32,
) -> MaybeUninit<ffi::ibv_send_wr> {
    let mut request = MaybeUninit::<ffi::ibv_send_wr>::uninit();
    let raw = request.as_mut_ptr();
    // SAFETY: the fields are within the request, and have nothing to drop.
    unsafe {
        (*raw).wr_id = wr_id;
        (*raw).next = ptr::null_mut();
        (*raw).sg_list = sge;
        (*raw).num_sge = i32::from(sge.length != 0);
        (*raw).opcode = opcode;
        (*raw).send_flags = send_flags;
    }
    request
}

/// The methods of the send side, which a queue pair and its [`SendHalf`] share. Both store the pointer
/// directly, and reach the queue pair for what is needed less often.
macro_rules! send_methods {
    () => {
        /// `ibv_post_send`: sends the elements of `region` in `range` as one message, with a
        /// completion.
        ///
        /// # Errors
        ///
        ///  - `EINVAL`: the range is out of bounds, or longer than 4 GiB - 1 bytes, or the queue pair
        ///    is not connected, or has no fixed peer (UD, XRC).
        ///  - `ENOMEM`: the send queue is full ([`QueueFull`](crate::ErrorKind::QueueFull)).
        ///  - `EIO`: the device is gone.
        ///
        /// # Safety
        ///
        /// [That of posting](QueuePair#the-contract-of-posting).
        #[doc(alias = "ibv_post_send")]
        #[inline]
        pub unsafe fn post_send(
            &mut self,
            region: &impl LocalMemory,
            range: impl RangeBounds<usize>,
            wr_id: u64,
        ) -> Result<()> {
            self.queue_pair().need_peer()?;
            let mut sge = region.sge(range)?;
            let opcode = ffi::ibv_wr_opcode::IBV_WR_SEND;
            let mut request = request(wr_id, &mut sge, opcode, SIGNALED);
            // SAFETY: the queue pair is live, the request is well-formed, and the caller keeps the
            // memory until the completion was polled.
            let returned = unsafe { post_send(self.as_raw(), request.as_mut_ptr()) };
            if returned == 0 { Ok(()) } else { Err(self.send_failed(&sge, SIGNALED, returned)) }
        }

        /// `ibv_post_send`: writes the elements of `region` in `range` to the beginning of `remote`,
        /// with a completion. The peer does not notice.
        ///
        /// # Errors
        ///
        ///  - `EINVAL`: the range is out of bounds, or longer than 4 GiB - 1 bytes or than the remote
        ///    region, or the queue pair is not connected, or has no fixed peer (UD, XRC).
        ///  - `ENOMEM`: the send queue is full ([`QueueFull`](crate::ErrorKind::QueueFull)).
        ///  - `EIO`: the device is gone.
        ///
        /// # Safety
        ///
        /// That of [`post_send`](Self::post_send).
        #[doc(alias = "ibv_post_send")]
        #[inline]
        pub unsafe fn post_write(
            &mut self,
            region: &impl LocalMemory,
            range: impl RangeBounds<usize>,
            remote: impl Into<RemoteMemoryRegion>,
            wr_id: u64,
        ) -> Result<()> {
            let remote = remote.into();
            self.queue_pair().need_peer()?;
            let mut sge = region.sge(range)?;
            check_remote(&remote, sge.length.into())?;
            let opcode = ffi::ibv_wr_opcode::IBV_WR_RDMA_WRITE;
            let mut request = request(wr_id, &mut sge, opcode, SIGNALED);
            // SAFETY: the field is within the request, and has nothing to drop.
            unsafe { (*request.as_mut_ptr()).wr.rdma = rdma(&remote) };
            // SAFETY: as in `post_send`.
            let returned = unsafe { post_send(self.as_raw(), request.as_mut_ptr()) };
            if returned == 0 { Ok(()) } else { Err(self.send_failed(&sge, SIGNALED, returned)) }
        }

        /// `ibv_post_send`: reads from the beginning of `remote` into the elements of `region` in
        /// `range`, with a completion. The peer does not notice.
        ///
        /// On iWARP the peer answers a read by writing, so the region must allow
        /// [`REMOTE_WRITE`](crate::AccessFlags::REMOTE_WRITE): otherwise most devices (not Soft-iWARP) fail
        /// the read or end the connection.
        ///
        /// # Errors
        ///
        ///  - `EINVAL`: the range is out of bounds, or longer than 4 GiB - 1 bytes or than the remote
        ///    region, or the queue pair is not connected, or has no fixed peer (UD, XRC).
        ///  - `ENOMEM`: the send queue is full ([`QueueFull`](crate::ErrorKind::QueueFull)).
        ///  - `EIO`: the device is gone.
        ///
        /// # Safety
        ///
        /// [That of posting](QueuePair#the-contract-of-posting).
        #[doc(alias = "ibv_post_send")]
        #[inline]
        pub unsafe fn post_read(
            &mut self,
            region: &mut impl LocalMemoryMut,
            range: impl RangeBounds<usize>,
            remote: impl Into<RemoteMemoryRegion>,
            wr_id: u64,
        ) -> Result<()> {
            let remote = remote.into();
            self.queue_pair().need_peer()?;
            let mut sge = region.sge(range)?;
            check_remote(&remote, sge.length.into())?;
            let opcode = ffi::ibv_wr_opcode::IBV_WR_RDMA_READ;
            let mut request = request(wr_id, &mut sge, opcode, SIGNALED);
            // SAFETY: the field is within the request, and has nothing to drop.
            unsafe { (*request.as_mut_ptr()).wr.rdma = rdma(&remote) };
            // SAFETY: the queue pair is live, the request is well-formed, and the caller keeps the
            // memory until the completion was polled.
            let returned = unsafe { post_send(self.as_raw(), request.as_mut_ptr()) };
            if returned == 0 { Ok(()) } else { Err(self.send_failed(&sge, SIGNALED, returned)) }
        }

        /// `ibv_post_send`: sends `bytes` as one message, with a completion. They are copied before
        /// this returns, so they need not be registered memory, and may be reused at once.
        ///
        /// # Errors
        ///
        ///  - `EINVAL`: there are more bytes than [`QueuePair::max_inline_data`], or the queue pair is
        ///    not connected, or has no fixed peer (UD, XRC).
        ///  - `ENOMEM`: the send queue is full ([`QueueFull`](crate::ErrorKind::QueueFull)).
        ///  - `EIO`: the device is gone.
        ///
        /// # Safety
        ///
        /// [That of posting](QueuePair#the-contract-of-posting): for inline data, only `wr_id` matters.
        #[doc(alias = "ibv_post_send")]
        #[inline]
        pub unsafe fn post_inline(&mut self, bytes: &[u8], wr_id: u64) -> Result<()> {
            self.queue_pair().need_peer()?;
            let most = self.queue_pair().max_inline_data();
            if bytes.len() > most as usize {
                return Err(too_long_inline(bytes.len() as u64, most));
            }
            let mut sge = sge(bytes.as_ptr() as u64, bytes.len(), 0)?;
            let opcode = ffi::ibv_wr_opcode::IBV_WR_SEND;
            let mut request = request(wr_id, &mut sge, opcode, SIGNALED | INLINE);
            // SAFETY: the queue pair is live, the request is well-formed, and inline data is copied
            // during the call.
            let returned = unsafe { post_send(self.as_raw(), request.as_mut_ptr()) };
            if returned == 0 { Ok(()) } else { Err(self.send_failed(&sge, INLINE, returned)) }
        }

        /// `ibv_post_send`: posts the requests of a list with one call, in order.
        ///
        /// # Errors
        ///
        /// [`ListError::posted`] requests were posted; the one after them was refused:
        ///
        ///  - `EINVAL`: it has more elements or more inline data than the queue pair was built for, or the
        ///    queue pair is not connected, or does not have the operation.
        ///  - `ENOMEM`: the send queue is full ([`QueueFull`](crate::ErrorKind::QueueFull)).
        ///  - `EIO`: the device is gone.
        ///
        /// # Safety
        ///
        /// [That of posting](QueuePair#the-contract-of-posting), for each request of the list, even if this
        /// fails.
        #[doc(alias = "ibv_post_send")]
        #[inline]
        pub unsafe fn post_list(&mut self, list: &mut SendList<'_>) -> Result<(), ListError> {
            let (first, bad) = list.as_raw();
            // SAFETY: the queue pair is live, the list is well-formed, and the caller keeps the
            // memory until the completions were polled.
            let returned = unsafe { ffi::ibv_post_send(self.as_raw(), first, bad) };
            if returned == 0 {
                return Ok(());
            }
            let (posted, request) = list.failed();
            Err(ListError::new(
                explain_send(self.queue_pair(), request, returned),
                posted,
                list.len(),
            ))
        }

        /// `ibv_post_send`: posts requests, each under its own number, with one call and in order.
        ///
        /// ```no_run
        /// # use ibverbs::{QueuePair, ReadWorkRequest, Result, SendListEntry, SendWorkRequest};
        /// # unsafe fn f(
        /// #     queue_pair: &mut QueuePair<'_>,
        /// #     (a, b): (SendWorkRequest<'_>, SendWorkRequest<'_>),
        /// #     read: ReadWorkRequest<'_>,
        /// # ) -> Result<()> {
        /// unsafe { queue_pair.post_requests([(1, &a), (2, &b)])? };
        /// // Requests of different types:
        /// let entries = [(3, SendListEntry::from(&a)), (4, SendListEntry::from(&read))];
        /// unsafe { queue_pair.post_requests(entries)? };
        /// # Ok(())
        /// # }
        /// ```
        ///
        /// This allocates a vector for the list. To avoid that, keep a [`SendList`] and post it with
        /// [`post_list`](Self::post_list).
        ///
        /// # Errors
        ///
        /// Those of [`post_list`](Self::post_list), and:
        ///
        ///  - `EINVAL`: there are no requests.
        ///
        /// # Safety
        ///
        /// That of [`post_list`](Self::post_list).
        #[doc(alias = "ibv_post_send")]
        pub unsafe fn post_requests<'wr, R: Into<SendListEntry<'wr>>>(
            &mut self,
            requests: impl IntoIterator<Item = (u64, R)>,
        ) -> Result<(), ListError> {
            let mut entries = SendListEntry::collect(requests);
            let mut list =
                SendList::new(&mut entries).map_err(|error| ListError::new(error, 0, 0))?;
            // SAFETY: the caller keeps the contract.
            unsafe { self.post_list(&mut list) }
        }

        /// `ibv_wr_start`, `ibv_wr_complete`: posts all requests that `build` adds to a [`Batch`], or none
        /// of them, through the extended posting interface.
        ///
        /// Nothing is posted if `build` fails or panics. If the device refuses one of the requests, none is
        /// posted on most devices; on Soft-RoCE all may be queued (see
        /// [the contract](QueuePair#the-contract-of-posting)).
        ///
        /// While `build` runs, the queue pair's send queue is locked, and on EFA also its completion
        /// queues: `build` must neither poll them nor post to this queue pair, as that may wait for ever.
        ///
        /// ```no_run
        /// use ibverbs::{Inline, QueuePairType, SendFlags, SendOperations};
        ///
        /// # fn main() -> ibverbs::Result<()> {
        /// # let context = ibverbs::open("rxe0")?;
        /// # let domain = context.alloc_pd()?;
        /// # let queue = context.create_cq(16)?;
        /// let region = domain.allocate::<u8>(1024)?;
        /// let prepared = domain
        ///     .create_qp(&queue, &queue, QueuePairType::ReliableConnected)
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
        ///         batch.send(1, SendFlags::empty(), Inline(b"header"))?;
        ///         batch.send(2, SendFlags::SIGNALED, &[body])
        ///     })?;
        /// }
        /// # Ok(())
        /// # }
        /// ```
        ///
        /// # Errors
        ///
        ///  - `EOPNOTSUPP`: the queue pair was not built with the extended interface
        ///    ([`QueuePairBuilder::extended`](crate::QueuePairBuilder::extended)).
        ///  - `ENOMEM`: the send queue has no room for all of them
        ///    ([`QueueFull`](crate::ErrorKind::QueueFull)).
        ///  - `EINVAL`: the device refuses one of them.
        ///  - `EACCES`, `EIO` (Soft-RoCE): the process has changed its credentials since it opened the
        ///    device, or the device is gone.
        ///  - The error that `build` returns: any type that an [`Error`](crate::Error) converts to, so that
        ///    an error of the program's own aborts the batch too.
        ///
        /// # Safety
        ///
        /// [That of posting](QueuePair#the-contract-of-posting), for each request, even if this fails after
        /// `build` has returned `Ok`.
        #[doc(alias = "ibv_wr_start")]
        #[doc(alias = "ibv_wr_complete")]
        #[doc(alias = "ibv_wr_abort")]
        #[inline]
        pub unsafe fn batch<T, E: From<Error>>(
            &mut self,
            build: impl FnOnce(&mut Batch<'_>) -> Result<T, E>,
        ) -> Result<T, E> {
            let Some(extended) = self.as_raw_extended() else {
                return Err(not_extended().into());
            };
            // SAFETY: the queue pair is live and has the interface; the caller keeps the contract.
            unsafe { Batch::run(extended, self.queue_pair(), build) }
        }

        #[cold]
        fn send_failed(&self, sge: &ffi::ibv_sge, flags: u32, returned: i32) -> Error {
            explain_elements(self.queue_pair(), std::slice::from_ref(sge), flags, returned)
        }
    };
}

/// The methods of the receive side, which a queue pair and its [`ReceiveHalf`] share.
macro_rules! receive_methods {
    () => {
        /// `ibv_post_recv`: receives one message into the elements of `region` in `range`.
        ///
        /// # Errors
        ///
        ///  - `EINVAL`: the range is out of bounds, or longer than 4 GiB - 1 bytes, or the queue pair
        ///    is in RESET or has a shared receive queue. The error says which.
        ///  - `ENOMEM`: the receive queue is full ([`QueueFull`](crate::ErrorKind::QueueFull)).
        ///  - `EIO`: the device is gone.
        ///
        /// # Safety
        ///
        /// [That of posting](QueuePair#the-contract-of-posting).
        #[doc(alias = "ibv_post_recv")]
        #[inline]
        pub unsafe fn post_receive(
            &mut self,
            region: &mut impl LocalMemoryMut,
            range: impl RangeBounds<usize>,
            wr_id: u64,
        ) -> Result<()> {
            let mut sge = region.sge(range)?;
            let next = std::ptr::null_mut();
            // mlx4 and mthca interpret 0 bytes as 2 GiB.
            let num_sge = i32::from(sge.length != 0);
            let mut request = ffi::ibv_recv_wr { wr_id, next, sg_list: &mut sge, num_sge };
            // SAFETY: the queue pair is live, the request is well-formed, and the caller keeps the
            // memory until the completion was polled.
            let returned = unsafe { post_receive(self.as_raw(), &mut request) };
            if returned == 0 { Ok(()) } else { Err(self.receive_failed(&request, returned)) }
        }

        /// `ibv_post_recv`: posts the receives of a list with one call, in order.
        ///
        /// # Errors
        ///
        /// [`ListError::posted`] receives were posted; the one after them was refused:
        ///
        ///  - `EINVAL`: it has more elements than the queue pair was built for, or the queue pair is in
        ///    RESET or has a shared receive queue.
        ///  - `ENOMEM`: the receive queue is full ([`QueueFull`](crate::ErrorKind::QueueFull)).
        ///  - `EIO`: the device is gone.
        ///
        /// # Safety
        ///
        /// [That of posting](QueuePair#the-contract-of-posting), for each receive of the list, even if this
        /// fails.
        #[doc(alias = "ibv_post_recv")]
        #[inline]
        pub unsafe fn post_receive_list(
            &mut self,
            list: &mut ReceiveList<'_>,
        ) -> Result<(), ListError> {
            let (first, bad) = list.as_raw();
            // SAFETY: the queue pair is live, the list is well-formed, and the caller keeps the
            // memory until the completions were polled.
            let returned = unsafe { ffi::ibv_post_recv(self.as_raw(), first, bad) };
            if returned == 0 {
                return Ok(());
            }
            let (posted, request) = list.failed();
            Err(ListError::new(self.receive_failed(request, returned), posted, list.len()))
        }

        /// `ibv_post_recv`: posts receives, each under its own number, with one call and in order.
        ///
        /// This allocates a vector for the list. To avoid that, keep a [`ReceiveList`] and post it with
        /// [`post_receive_list`](Self::post_receive_list).
        ///
        /// # Errors
        ///
        /// Those of [`post_receive_list`](Self::post_receive_list), and:
        ///
        ///  - `EINVAL`: there are no receives.
        ///
        /// # Safety
        ///
        /// That of [`post_receive_list`](Self::post_receive_list).
        #[doc(alias = "ibv_post_recv")]
        pub unsafe fn post_receives<'wr, R: Into<ReceiveListEntry<'wr>>>(
            &mut self,
            receives: impl IntoIterator<Item = (u64, R)>,
        ) -> Result<(), ListError> {
            let mut entries = ReceiveListEntry::collect(receives);
            let mut list =
                ReceiveList::new(&mut entries).map_err(|error| ListError::new(error, 0, 0))?;
            // SAFETY: the caller keeps the contract.
            unsafe { self.post_receive_list(&mut list) }
        }

        #[cold]
        fn receive_failed(&self, request: &ffi::ibv_recv_wr, returned: i32) -> Error {
            explain_receive(self.queue_pair(), request, returned)
        }
    };
}

#[cold]
fn no_peer() -> Error {
    let reason = "the queue pair has no peer: post a request that says where it goes";
    Error::invalid("ibv_post_send", reason)
}

#[cold]
pub(super) fn not_extended() -> Error {
    let reason = "the queue pair was built without the extended posting interface";
    Error::with_reason("ibv_wr_start", libc::EOPNOTSUPP, reason)
}

pub(super) use {receive_methods, send_methods};

/// Posting requests of either queue, and splitting.
impl<'res> QueuePair<'res> {
    /// `ibv_post_send`, `ibv_post_recv`: posts a request to the queue that it is for, under the number
    /// `wr_id`. The same request can be posted repeatedly.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the request has more elements or more inline data than the queue pair was built for, or
    ///    the queue pair's state does not allow it, or the queue pair does not have the operation.
    ///  - `ENOMEM`: the queue is full ([`QueueFull`](crate::ErrorKind::QueueFull)).
    ///  - `EIO`: the device is gone.
    ///  - `EACCES` (Soft-RoCE and Soft-iWARP): the process has changed its credentials since it opened
    ///    the device.
    ///
    /// # Safety
    ///
    /// [That of posting](QueuePair#the-contract-of-posting).
    ///
    /// On a queue pair that sends datagrams, the request is a send with a destination
    /// ([`SendWorkRequest::to`](crate::SendWorkRequest::to)): providers read the destination without
    /// checking that there is one.
    ///
    /// The elements and the request itself may be dropped immediately.
    #[doc(alias = "ibv_post_send")]
    #[doc(alias = "ibv_post_recv")]
    #[inline]
    pub unsafe fn post(&mut self, request: &mut impl WorkRequest, wr_id: u64) -> Result<()> {
        // SAFETY: the queue pair is live, and the caller keeps the memory.
        let returned = unsafe { request.post(self.as_raw(), wr_id) };
        if returned == 0 { Ok(()) } else { Err(request.explain(self, returned)) }
    }

    send_methods!();
    receive_methods!();

    /// The send half and the receive half, for use by two threads.
    ///
    /// ```no_run
    /// # use ibverbs::QueuePairType;
    /// # fn main() -> ibverbs::Result<()> {
    /// # let context = ibverbs::open("rxe0")?;
    /// # let domain = context.alloc_pd()?;
    /// # let queue = context.create_cq(16)?;
    /// let mut region = domain.allocate::<u8>(16)?;
    /// # let prepared = domain.create_qp(&queue, &queue, QueuePairType::ReliableConnected)
    /// #     .max_inline_data(16).build()?;
    /// # let remote = prepared.endpoint();
    /// let mut queue_pair = prepared.handshake(remote)?;
    /// let (mut send, mut receive) = queue_pair.split();
    /// std::thread::scope(|scope| {
    ///     // SAFETY: no other request is outstanding under 1.
    ///     scope.spawn(move || unsafe { send.post_inline(b"hello", 1) });
    ///     // SAFETY: the region is not touched until the completion of 2 was polled, and dropped after
    ///     // the queue pair.
    ///     unsafe { receive.post_receive(&mut region, .., 2) }
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    #[inline]
    pub fn split(&mut self) -> (SendHalf<'_, 'res>, ReceiveHalf<'_, 'res>) {
        (SendHalf::new(self), ReceiveHalf::new(self))
    }

    /// Whether the queue pair has a fixed peer, so that requests do not name one.
    #[inline]
    pub(super) fn need_peer(&self) -> Result<()> {
        if self.has_peer() { Ok(()) } else { Err(no_peer()) }
    }

    #[inline]
    fn queue_pair(&self) -> &Self {
        self
    }
}
