//! The methods that post to the send queue.

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
            self.queue_pair().erased().need_peer()?;
            let element = region.sge(range)?;
            let opcode = ffi::ibv_wr_opcode::IBV_WR_SEND;
            // SAFETY: the caller keeps the memory until the completion was polled.
            unsafe { self.post_element(wr_id, element, opcode, SIGNALED, |_| ()) }
        }

        /// `ibv_post_send`: sends the elements of `region` in `range` as one message, with a completion, and
        /// with 32 bits for the completion of the receive
        /// ([`WorkSuccess::immediate`](crate::WorkSuccess::immediate)).
        ///
        /// # Errors
        ///
        /// Those of [`post_send`](Self::post_send).
        ///
        /// # Safety
        ///
        /// [That of posting](QueuePair#the-contract-of-posting).
        #[doc(alias = "ibv_post_send")]
        #[inline]
        pub unsafe fn post_send_with_immediate(
            &mut self,
            region: &impl LocalMemory,
            range: impl RangeBounds<usize>,
            immediate: u32,
            wr_id: u64,
        ) -> Result<()> {
            self.queue_pair().erased().need_peer()?;
            let element = region.sge(range)?;
            let opcode = ffi::ibv_wr_opcode::IBV_WR_SEND_WITH_IMM;
            // SAFETY: the caller keeps the memory until the completion was polled.
            unsafe {
                self.post_element(wr_id, element, opcode, SIGNALED, |request| {
                    (*request).__bindgen_anon_1.imm_data = immediate.to_be();
                })
            }
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
            let element = self.queue_pair().erased().inline_element(bytes)?;
            let opcode = ffi::ibv_wr_opcode::IBV_WR_SEND;
            // SAFETY: inline data is copied during the call.
            unsafe { self.post_element(wr_id, element, opcode, SIGNALED | INLINE, |_| ()) }
        }

        /// `ibv_post_send`: sends pieces of bytes, one after the other, as one message, with a completion.
        /// They are copied before this returns, as in [`post_inline`](Self::post_inline).
        ///
        /// # Errors
        ///
        /// Those of [`post_inline`](Self::post_inline). All pieces together have at most 2048 bytes.
        ///
        /// # Safety
        ///
        /// [That of posting](QueuePair#the-contract-of-posting): for inline data, only `wr_id` matters.
        #[doc(alias = "ibv_post_send")]
        pub unsafe fn post_inline_list(
            &mut self,
            pieces: &[IoSlice<'_>],
            wr_id: u64,
        ) -> Result<()> {
            let most = self.queue_pair().erased().max_inline_data();
            let mut buffer = [MaybeUninit::uninit(); GATHERED];
            let bytes = InlineList(pieces).gather(most, &mut buffer)?;
            // SAFETY: the caller keeps the contract.
            unsafe { self.post_inline(bytes, wr_id) }
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
            // If siw has posted a part of a list and refuses the rest, it returns 0, but names the first request
            // that it has refused.
            // SAFETY: the list owns the pointer, which was null before the call.
            if returned == 0 && unsafe { (*bad).is_null() } {
                return Ok(());
            }
            let (posted, request) = list.failed();
            Err(ListError::new(
                explain_send(self.queue_pair().erased(), request, returned),
                posted,
                list.len(),
            ))
        }

        /// `ibv_post_send`: posts requests, each under its own number, with one call and in order.
        ///
        /// ```
        /// # let rxe0 = ibverbs_software::Device::builder().name("rxe0").build().unwrap();
        /// # rxe0.register();
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
        /// use ibverbs::{Inline, QueuePairType, SendFlags, SendOperations};
        ///
        /// # fn main() -> ibverbs::Result<()> {
        /// # let rxe0 = ibverbs_software::Device::builder().name("rxe0").build().unwrap();
        /// # rxe0.register();
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
        ///         batch.send(1, SendFlags::UNSIGNALED, Inline(b"header"))?;
        ///         batch.send(2, SendFlags::empty(), &[body])
        ///     })?;
        /// }
        /// # Ok(())
        /// # }
        /// ```
        ///
        /// # Errors
        ///
        ///  - `EOPNOTSUPP`, from the methods of the batch: the queue pair was not built for the operation.
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
            build: impl FnOnce(&mut Batch<'_>) -> Result<V, E>,
        ) -> Result<V, E> {
            // SAFETY: the caller keeps the contract.
            unsafe { Batch::run(self.queue_pair().erased(), build) }
        }

        /// Posts a request with one element, or with none if that is empty. `set` sets the fields that only
        /// this opcode has.
        ///
        /// # Safety
        ///
        /// The contract of posting; `set` gets a pointer to a request whose common fields are set.
        #[inline]
        unsafe fn post_element(
            &mut self,
            wr_id: u64,
            mut element: ffi::ibv_sge,
            opcode: ffi::ibv_wr_opcode,
            flags: u32,
            set: impl FnOnce(*mut ffi::ibv_send_wr),
        ) -> Result<()> {
            let mut request = request(wr_id, &mut element, opcode, flags);
            set(request.as_mut_ptr());
            // SAFETY: the queue pair is live, the request is well-formed, and the caller keeps the memory.
            let returned = unsafe { post_send(self.as_raw(), request.as_mut_ptr()) };
            if returned == 0 { Ok(()) } else { Err(self.send_failed(&element, flags, returned)) }
        }

        #[cold]
        fn send_failed(&self, sge: &ffi::ibv_sge, flags: u32, returned: i32) -> Error {
            explain_elements(self.queue_pair().erased(), std::slice::from_ref(sge), flags, returned)
        }
    };
}

pub(super) use send_methods;
