use std::fmt;
use std::marker::PhantomData;
use std::ops::RangeBounds;
use std::sync::Arc;

use super::post::{post, receive_methods, send_methods};
use super::prepared_request::{RawRequest, TakesPrepared};
use crate::base::{Error, Result, ffi};
use crate::verbs::memory::{
    GatherElement, LocalMemory, LocalMemoryMut, RemoteMemoryRegion, ScatterBuffer, ScatterElement,
};
use crate::verbs::operation::{
    Batch, ListError, Posts, PreparedReceive, PreparedRequest, ReadWorkRequest, ReceiveList,
    ReceiveWorkRequest, SendList, SendQueueRequest, SendWorkRequest, WriteWorkRequest,
};
use crate::verbs::queue_pair::{
    FixedPeer, PostsRdma, QueuePair, Rc, Reads, ReceiveQueue, Sends, Transport, Writes,
};

macro_rules! half_type {
    ($(#[$meta:meta])* $half:ident) => {
        $(#[$meta])*
        pub struct $half<'q, 'res, T = Rc> {
            raw: *mut ffi::ibv_qp,
            queue_pair: &'q QueuePair<'res, T>,
            whole: PhantomData<&'q mut ()>,
        }

        // SAFETY: any thread may use a queue pair, and two its two queues: providers lock each separately.
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
            pub fn queue_pair(&self) -> &QueuePair<'res, T> {
                self.queue_pair
            }

            /// The C object.
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

half_type! {
    /// The send side of a queue pair: see [`QueuePair::split`].
    SendHalf
}

half_type! {
    /// The receive side of a queue pair: see [`QueuePair::split`].
    ReceiveHalf
}

macro_rules! owned_half_type {
    ($(#[$meta:meta])* $owned:ident, $half:ident) => {
        $(#[$meta])*
        #[derive(Debug)]
        pub struct $owned<'res, T: Transport = Rc>(Arc<QueuePair<'res, T>>);

        impl<'res, T: Transport> $owned<'res, T> {
            /// The half, to post with.
            #[inline]
            pub fn half(&mut self) -> $half<'_, 'res, T> {
                $half::new(&self.0)
            }

            /// The whole queue pair, for queries.
            pub fn queue_pair(&self) -> &QueuePair<'res, T> {
                &self.0
            }
        }
    };
}

owned_half_type! {
    /// The send side of a queue pair, which it keeps: see [`QueuePair::into_split`].
    OwnedSendHalf, SendHalf
}

owned_half_type! {
    /// The receive side of a queue pair, which it keeps: see [`QueuePair::into_split`].
    OwnedReceiveHalf, ReceiveHalf
}

impl<'res, T: Transport> QueuePair<'res, T> {
    /// Splits the queue pair into a send half and a receive half, for two threads.
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

    /// As [`split`](Self::split), for good: each half can be stored and moves to any thread, such as the receive half to
    /// the one that polls, and the send half into a lock of its own for the threads that send. So no sender waits for
    /// the poller. When both are dropped, the queue pair is destroyed.
    ///
    /// ```
    /// use std::sync::{Arc, Mutex};
    ///
    /// use ibverbs::operation::{OwnedReceiveHalf, OwnedSendHalf};
    /// use ibverbs::{
    ///     CompletionQueue, Inline, ProtectionDomain, QueuePairBuilder, Rc, ReceiveWorkRequest, SendWorkRequest,
    /// };
    ///
    /// struct Sender(Mutex<OwnedSendHalf<'static>>);
    /// struct Poller(CompletionQueueOf, OwnedReceiveHalf<'static>);
    /// type CompletionQueueOf = Arc<CompletionQueue<'static>>;
    ///
    /// # fn main() -> ibverbs::Result<()> {
    /// # let rxe0 = ibverbs_software::Device::builder().name("rxe0").build().unwrap();
    /// # rxe0.register();
    /// let context = Arc::new(ibverbs::open("rxe0")?);
    /// let domain = Arc::new(ProtectionDomain::new(&context)?);
    /// let queue = Arc::new(CompletionQueue::new(&context, 16)?);
    /// let builder = QueuePairBuilder::new(&domain, &queue, &queue, Rc).max_inline_data(16);
    /// let prepared = builder.max_send_wr(2).max_recv_wr(2).build()?;
    /// # let remote = prepared.endpoint();
    /// let (send, receive) = prepared.handshake(remote)?.into_split();
    /// let (sender, mut poller) = (Arc::new(Sender(Mutex::new(send))), Poller(queue, receive));
    /// for wr_id in 0..2 {
    ///     // SAFETY: a receive of no bytes has no memory.
    ///     unsafe { poller.1.half().post(ReceiveWorkRequest::new(()), wr_id) }?;
    /// }
    /// let threads = [2, 3].map(|wr_id| {
    ///     let sender = sender.clone();
    ///     std::thread::spawn(move || {
    ///         let mut send = sender.0.lock().unwrap();
    ///         // SAFETY: a message of no bytes has no memory, and no other request is outstanding under the number.
    ///         unsafe { send.half().post(SendWorkRequest::new(Inline(b"")), wr_id) }
    ///     })
    /// });
    /// let (mut ended, mut completions) = (0, [Default::default(); 4]);
    /// while ended < 4 {
    ///     for completion in poller.0.poll(&mut completions)? {
    ///         completion.result().expect("it has succeeded");
    ///         ended += 1;
    ///     }
    /// }
    /// # threads.map(|thread| thread.join().unwrap().unwrap());
    /// # Ok(())
    /// # }
    /// ```
    pub fn into_split(self) -> (OwnedSendHalf<'res, T>, OwnedReceiveHalf<'res, T>) {
        let whole = Arc::new(self);
        (OwnedSendHalf(whole.clone()), OwnedReceiveHalf(whole))
    }
}

impl<T: Transport> SendHalf<'_, '_, T> {
    /// `ibv_post_send`: [`QueuePair::post`] to the send queue.
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

    /// `ibv_post_send`: [`QueuePair::post_prepared`] to the send queue.
    ///
    /// # Errors
    ///
    /// Those of [`QueuePair::post`].
    ///
    /// # Safety
    ///
    /// That of [`QueuePair::post_prepared`].
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
    /// `ibv_post_recv`: [`QueuePair::post`] to the receive queue.
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

    /// `ibv_post_recv`: [`QueuePair::post_prepared`] to the receive queue.
    ///
    /// # Errors
    ///
    /// Those of [`QueuePair::post`].
    ///
    /// # Safety
    ///
    /// That of [`QueuePair::post_prepared`].
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
