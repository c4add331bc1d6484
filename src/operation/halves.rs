//! The two halves of a queue pair, for use by two threads.

use std::fmt;
use std::marker::PhantomData;
use std::ops::RangeBounds;

use super::post::post;
use super::post::receive_methods;
use super::post::send_methods;
use super::prepared_request::{RawRequest, TakesPrepared};
use crate::error::{Error, Result};
use crate::ffi;
use crate::memory::{
    GatherElement, LocalMemory, LocalMemoryMut, RemoteMemoryRegion, ScatterBuffer, ScatterElement,
};
use crate::operation::{
    Batch, ListError, Posts, PreparedReceive, PreparedRequest, ReadWorkRequest, ReceiveList,
    ReceiveWorkRequest, SendList, SendQueueRequest, SendWorkRequest, WriteWorkRequest,
};
use crate::queue_pair::{
    FixedPeer, PostsRdma, QueuePair, Rc, Reads, ReceiveQueue, Sends, Transport, Writes,
};

/// Defines a half of a queue pair.
macro_rules! half {
    ($(#[$meta:meta])* $half:ident) => {
        $(#[$meta])*
        pub struct $half<'q, 'res, T = Rc> {
            raw: *mut ffi::ibv_qp,
            queue_pair: &'q QueuePair<'res, T>,
            whole: PhantomData<&'q mut ()>,
        }

        // SAFETY: a queue pair can be used from any thread, and its two queues at the same time: providers lock each
        // separately.
        unsafe impl<T: Transport> Send for $half<'_, '_, T> {}
        // SAFETY: as above; methods that post take `&mut self`.
        unsafe impl<T: Transport> Sync for $half<'_, '_, T> {}

        impl<'q, 'res, T: Transport> $half<'q, 'res, T> {
            /// The caller creates at most one send half and one receive half.
            #[inline]
            fn new(queue_pair: &'q QueuePair<'res, T>) -> Self {
                Self { raw: queue_pair.as_raw(), queue_pair, whole: PhantomData }
            }

            /// The whole queue pair, for queries.
            #[inline]
            pub fn queue_pair(&self) -> &QueuePair<'res, T> {
                self.queue_pair
            }

            /// The C object.
            #[inline]
            pub fn as_raw(&self) -> *mut ffi::ibv_qp {
                self.raw
            }
        }

        impl<T> fmt::Debug for $half<'_, '_, T> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.debug_tuple(stringify!($half)).field(self.queue_pair).finish()
            }
        }
    };
}

half! {
    /// The send side of a queue pair: see [`QueuePair::split`].
    SendHalf
}

half! {
    /// The receive side of a queue pair: see [`QueuePair::split`].
    ReceiveHalf
}

impl<'res, T: Transport> QueuePair<'res, T> {
    /// The send half and the receive half, for use by two threads.
    ///
    /// ```
    /// # use ibverbs::{Inline, Rc, SendWorkRequest};
    /// # fn main() -> ibverbs::Result<()> {
    /// # let rxe0 = ibverbs_software::Device::builder().name("rxe0").build().unwrap();
    /// # rxe0.register();
    /// # let context = ibverbs::open("rxe0")?;
    /// # let domain = context.alloc_pd()?;
    /// # let queue = context.create_cq(16)?;
    /// let mut region = domain.allocate::<u8>(16)?;
    /// # let prepared = domain.create_qp(&queue, &queue, Rc)
    /// #     .max_inline_data(16).build()?;
    /// # let remote = prepared.endpoint();
    /// let mut queue_pair = prepared.handshake(remote)?;
    /// let (mut send, mut receive) = queue_pair.split();
    /// std::thread::scope(|scope| {
    ///     // SAFETY: no other request is outstanding under 1.
    ///     scope.spawn(move || unsafe { send.post(SendWorkRequest::new(Inline(b"hello")), 1) });
    ///     // SAFETY: the region is not touched until the completion of 2 was polled, and dropped after
    ///     // the queue pair.
    ///     unsafe { receive.post_receive(&mut region, .., 2) }
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    #[inline]
    pub fn split(&mut self) -> (SendHalf<'_, 'res, T>, ReceiveHalf<'_, 'res, T>) {
        (SendHalf::new(self), ReceiveHalf::new(self))
    }
}

impl<T: Transport> SendHalf<'_, '_, T> {
    /// `ibv_post_send`: posts a request under the number `wr_id`. See [`QueuePair::post`].
    ///
    /// # Errors
    ///
    /// Those of [`QueuePair::post`].
    ///
    /// # Safety
    ///
    /// That of [`QueuePair::post`].
    #[doc(alias = "ibv_post_send")]
    #[inline]
    pub unsafe fn post<R: Posts<T> + SendQueueRequest>(
        &mut self,
        request: R,
        wr_id: u64,
    ) -> Result<()> {
        // SAFETY: the queue pair is live, and the caller keeps the contract.
        unsafe { post(self.queue_pair, self.raw, request, wr_id) }
    }

    /// `ibv_post_send`: posts a request that was prepared. See [`QueuePair::post_prepared`].
    ///
    /// # Errors
    ///
    /// Those of [`QueuePair::post`].
    ///
    /// # Safety
    ///
    /// That of [`QueuePair::post_prepared`].
    #[doc(alias = "ibv_post_send")]
    #[inline]
    pub unsafe fn post_prepared<F>(
        &mut self,
        request: &mut PreparedRequest<'_, F>,
        wr_id: u64,
    ) -> Result<()>
    where
        T: TakesPrepared<F>,
    {
        // SAFETY: the caller keeps the contract.
        unsafe { request.post(self.queue_pair, self.raw, wr_id) }
    }

    send_methods!();
}

impl<T: Transport> ReceiveHalf<'_, '_, T> {
    /// `ibv_post_recv`: posts a receive under the number `wr_id`. See [`QueuePair::post`].
    ///
    /// # Errors
    ///
    /// Those of [`QueuePair::post`].
    ///
    /// # Safety
    ///
    /// That of [`QueuePair::post`].
    #[doc(alias = "ibv_post_recv")]
    #[inline]
    pub unsafe fn post<D: ScatterBuffer>(
        &mut self,
        request: ReceiveWorkRequest<D>,
        wr_id: u64,
    ) -> Result<()>
    where
        T: ReceiveQueue,
    {
        // SAFETY: the queue pair is live, and the caller keeps the contract.
        unsafe { post(self.queue_pair, self.raw, request, wr_id) }
    }

    /// `ibv_post_recv`: posts a receive that was prepared. See [`QueuePair::post_prepared`].
    ///
    /// # Errors
    ///
    /// Those of [`QueuePair::post`].
    ///
    /// # Safety
    ///
    /// That of [`QueuePair::post_prepared`].
    #[doc(alias = "ibv_post_recv")]
    #[inline]
    pub unsafe fn post_prepared(
        &mut self,
        request: &mut PreparedReceive<'_>,
        wr_id: u64,
    ) -> Result<()>
    where
        T: ReceiveQueue,
    {
        // SAFETY: the caller keeps the contract.
        unsafe { request.post(self.queue_pair, self.raw, wr_id) }
    }

    receive_methods!();
}
