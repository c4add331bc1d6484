//! The methods that post to the send queue.

/// The methods of the send side, which a queue pair and its [`SendHalf`] share. Both store the pointer
/// directly, and reach the queue pair for what is needed less often.
macro_rules! send_methods {
    () => {
        /// `ibv_post_send`: sends the elements of `region` in `range` as one message, with a
        /// completion: [`post`](Self::post) of a [`SendWorkRequest`](crate::SendWorkRequest).
        ///
        /// # Errors
        ///
        ///  - `EINVAL`: the range is out of bounds, or longer than the port's
        ///    [`max_message_size`](crate::device::PortAttributes::max_message_size), or the queue pair is not connected, or has no fixed peer (UD, XRC).
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
        ) -> Result<()>
        where
            T: Sends + FixedPeer,
        {
            let element = GatherElement::new(region.sge(range)?);
            // SAFETY: the caller keeps the contract.
            unsafe { self.post(SendWorkRequest::new(element), wr_id) }
        }

        /// `ibv_post_send`: writes the elements of `region` in `range` to the beginning of `remote`,
        /// with a completion: [`post`](Self::post) of a [`WriteWorkRequest`](crate::WriteWorkRequest).
        ///
        /// # Errors
        ///
        /// Those of [`post_send`](Self::post_send), and `EINVAL`: the remote region is shorter.
        ///
        /// # Safety
        ///
        /// [That of posting](QueuePair#the-contract-of-posting).
        #[doc(alias = "ibv_post_send")]
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

        /// `ibv_post_send`: fills the elements of `region` in `range` from the beginning of `remote`, with a
        /// completion: [`post`](Self::post) of a [`ReadWorkRequest`](crate::ReadWorkRequest).
        ///
        /// # Errors
        ///
        /// Those of [`post_write`](Self::post_write).
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
        /// [`ListError::posted`] requests were posted; the one after them was refused:
        ///
        ///  - `EINVAL`: it has more elements or more inline data than the queue pair was built for, or the
        ///    queue pair is not connected, or does not have the operation.
        ///  - `ENOMEM`: the send queue is full ([`QueueFull`](crate::ErrorKind::QueueFull)).
        ///  - `EIO`: the device is gone.
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
                T::need_peer(self.queue_pair().erased()).map_err(refused)?;
            }
            if list.has_long {
                let limits = self.queue_pair().message_limits();
                let refused = |error| ListError::new(error, 0, list.len());
                limits.check_message(list.longest()).map_err(refused)?;
            }
            let (first, bad) = list.as_raw();
            // SAFETY: the queue pair is live, the list is well-formed, and the caller keeps the
            // memory until the completions were polled.
            let returned = unsafe { ffi::ibv_post_send(self.as_raw(), first, bad) };
            // If siw has posted a part of a list and refuses the rest, it returns 0, but names the first request
            // that it has refused.
            // SAFETY: the list owns the pointer, which was null before the call.
            if returned == 0 && unsafe { (*bad).is_null() } {
                return Ok(());
            }
            let (posted, request) = list.failed();
            let error = request.explain(self.queue_pair().erased(), returned);
            Err(ListError::new(error, posted, list.len()))
        }

        /// `ibv_wr_start`, `ibv_wr_complete`: posts all requests that `build` adds to a [`Batch`], or none
        /// of them, through the extended posting interface if the queue pair was built with it
        /// ([`QueuePairBuilder::extended`](crate::QueuePairBuilder::extended)).
        ///
        /// On other queue pairs, the requests are collected, which allocates memory, and posted as one list by
        /// `ibv_post_send`. All operations are there but segmented sends, flushes and atomic writes. If the
        /// device then refuses a request, those before it were posted.
        ///
        /// Nothing is posted if `build` fails or panics. If the device refuses one of the requests, none is
        /// posted on most devices; on Soft-RoCE all may be queued (see
        /// [the contract](QueuePair#the-contract-of-posting)).
        ///
        /// While `build` runs, the queue pair's send queue is locked, and on EFA also its completion
        /// queues: `build` must neither poll them nor post to this queue pair, as that may wait for ever.
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
