//! The methods that post to the receive queue.

/// The methods of the receive side, which a queue pair and its [`ReceiveHalf`] share.
macro_rules! receive_methods {
    () => {
        /// `ibv_post_recv`: receives one message into the elements of `region` in `range`: [`post`](Self::post) of a
        /// [`ReceiveWorkRequest`](crate::ReceiveWorkRequest).
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
        ) -> Result<(), ListError>
        where
            T: ReceiveQueue,
        {
            let (first, bad) = list.as_raw();
            // SAFETY: the queue pair is live, the list is well-formed, and the caller keeps the
            // memory until the completions were polled.
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
