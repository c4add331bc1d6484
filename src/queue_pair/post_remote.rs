//! The methods that post requests which access the peer's memory.

/// Writes, reads and atomics, which a queue pair and its [`SendHalf`] share.
macro_rules! remote_methods {
    () => {
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
            let opcode = ffi::ibv_wr_opcode::IBV_WR_RDMA_WRITE;
            // SAFETY: the caller keeps the memory until the completion was polled.
            unsafe { self.post_rdma(wr_id, || region.sge(range), remote.into(), opcode, |_| ()) }
        }

        /// `ibv_post_send`: writes the elements of `region` in `range` to the beginning of `remote`, with a
        /// completion. The write consumes a receive of the peer, whose completion carries these 32 bits
        /// ([`WorkSuccess::immediate`](crate::WorkSuccess::immediate)).
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
        pub unsafe fn post_write_with_immediate(
            &mut self,
            region: &impl LocalMemory,
            range: impl RangeBounds<usize>,
            remote: impl Into<RemoteMemoryRegion>,
            immediate: u32,
            wr_id: u64,
        ) -> Result<()> {
            let opcode = ffi::ibv_wr_opcode::IBV_WR_RDMA_WRITE_WITH_IMM;
            // SAFETY: the caller keeps the memory until the completion was polled.
            unsafe {
                self.post_rdma(
                    wr_id,
                    || region.sge(range),
                    remote.into(),
                    opcode,
                    |request| {
                        (*request).__bindgen_anon_1.imm_data = immediate.to_be();
                    },
                )
            }
        }

        /// `ibv_post_send`: writes `bytes` to the beginning of `remote`, with a completion. They are copied
        /// before this returns, as in [`post_inline`](Self::post_inline).
        ///
        /// # Errors
        ///
        /// Those of [`post_inline`](Self::post_inline), and:
        ///
        ///  - `EINVAL`: the remote region is shorter.
        ///
        /// # Safety
        ///
        /// [That of posting](QueuePair#the-contract-of-posting): for inline data, only `wr_id` matters.
        #[doc(alias = "ibv_post_send")]
        #[inline]
        pub unsafe fn post_write_inline(
            &mut self,
            bytes: &[u8],
            remote: impl Into<RemoteMemoryRegion>,
            wr_id: u64,
        ) -> Result<()> {
            let remote = remote.into();
            let element = self.queue_pair().erased().inline_element(bytes)?;
            check_remote(&remote, bytes.len() as u64)?;
            let opcode = ffi::ibv_wr_opcode::IBV_WR_RDMA_WRITE;
            // SAFETY: inline data is copied during the call.
            unsafe {
                self.post_element(wr_id, element, opcode, SIGNALED | INLINE, |request| {
                    (*request).wr.rdma = rdma(&remote);
                })
            }
        }

        /// `ibv_post_send`: reads from the beginning of `remote` into the elements of `region` in
        /// `range`, with a completion. The peer does not notice.
        ///
        /// If the answer is lost, the device reads again, and then finds what later requests of this queue pair have
        /// written, unless they carry a [fence](crate::WriteWorkRequest::fence).
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
            let opcode = ffi::ibv_wr_opcode::IBV_WR_RDMA_READ;
            // SAFETY: the caller keeps the memory until the completion was polled.
            unsafe {
                self.post_rdma(wr_id, || region.sge_mut(range), remote.into(), opcode, |_| ())
            }
        }

        /// `ibv_post_send`: sets the first 8 bytes of `remote` to `swap` if they equal `compare`, and stores
        /// their previous value in the 8 bytes of `result` in `range`, with a completion.
        ///
        /// # Errors
        ///
        /// Those of [`post_read`](Self::post_read), and:
        ///
        ///  - `EINVAL`: the range is not 8 bytes, `remote` has fewer than 8, or its address is not a multiple
        ///    of 8.
        ///
        /// # Safety
        ///
        /// [That of posting](QueuePair#the-contract-of-posting).
        #[doc(alias = "ibv_post_send")]
        #[inline]
        pub unsafe fn post_compare_swap(
            &mut self,
            result: &mut impl LocalMemoryMut,
            range: impl RangeBounds<usize>,
            remote: impl Into<RemoteMemoryRegion>,
            (compare, swap): (u64, u64),
            wr_id: u64,
        ) -> Result<()> {
            let opcode = ffi::ibv_wr_opcode::IBV_WR_ATOMIC_CMP_AND_SWP;
            // SAFETY: the caller keeps the memory until the completion was polled.
            unsafe {
                self.post_atomic(
                    wr_id,
                    || result.sge_mut(range),
                    remote.into(),
                    opcode,
                    (compare, swap),
                )
            }
        }

        /// `ibv_post_send`: adds `add` to the first 8 bytes of `remote`, and stores their previous value in
        /// the 8 bytes of `result` in `range`, with a completion.
        ///
        /// # Errors
        ///
        /// Those of [`post_compare_swap`](Self::post_compare_swap).
        ///
        /// # Safety
        ///
        /// [That of posting](QueuePair#the-contract-of-posting).
        #[doc(alias = "ibv_post_send")]
        #[inline]
        pub unsafe fn post_fetch_add(
            &mut self,
            result: &mut impl LocalMemoryMut,
            range: impl RangeBounds<usize>,
            remote: impl Into<RemoteMemoryRegion>,
            add: u64,
            wr_id: u64,
        ) -> Result<()> {
            let opcode = ffi::ibv_wr_opcode::IBV_WR_ATOMIC_FETCH_AND_ADD;
            // SAFETY: the caller keeps the memory until the completion was polled.
            unsafe {
                self.post_atomic(wr_id, || result.sge_mut(range), remote.into(), opcode, (add, 0))
            }
        }

        /// Posts a read or a write between `element` and the beginning of `remote`. `set` sets the fields that
        /// only this opcode has.
        ///
        /// # Safety
        ///
        /// The contract of posting; `set` gets a pointer to a request whose common fields are set.
        #[inline]
        unsafe fn post_rdma(
            &mut self,
            wr_id: u64,
            element: impl FnOnce() -> Result<ffi::ibv_sge>,
            remote: RemoteMemoryRegion,
            opcode: ffi::ibv_wr_opcode,
            set: impl FnOnce(*mut ffi::ibv_send_wr),
        ) -> Result<()> {
            self.queue_pair().erased().need_peer()?;
            let element = element()?;
            check_remote(&remote, element.length.into())?;
            // SAFETY: the caller keeps the contract.
            unsafe {
                self.post_element(wr_id, element, opcode, SIGNALED, |request| {
                    (*request).wr.rdma = rdma(&remote);
                    set(request);
                })
            }
        }

        /// Posts an atomic with its two operands, whose result the device writes to `element`.
        ///
        /// # Safety
        ///
        /// The contract of posting.
        #[inline]
        unsafe fn post_atomic(
            &mut self,
            wr_id: u64,
            element: impl FnOnce() -> Result<ffi::ibv_sge>,
            remote: RemoteMemoryRegion,
            opcode: ffi::ibv_wr_opcode,
            (compare_add, swap): (u64, u64),
        ) -> Result<()> {
            self.queue_pair().erased().need_peer()?;
            let element = element()?;
            check_atomic(&remote, element.length.into())?;
            // SAFETY: the caller keeps the contract.
            unsafe {
                self.post_element(wr_id, element, opcode, SIGNALED, |request| {
                    (*request).wr.atomic = atomic(&remote, compare_add, swap);
                })
            }
        }
    };
}

pub(super) use remote_methods;
