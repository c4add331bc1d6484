//! What futures post.

use std::future::Future;
use std::os::fd::BorrowedFd;

use super::AsyncChannel;
use super::locked_loop::{Lock, Locked, Share, destroy, release_quietly};
#[cfg(feature = "rdmacm")]
use crate::base::{QueuePairType, ffi};
use crate::base::{Result, StateError, debug};
use crate::channel::parts::{Link, Refused, of_socket};
use crate::channel::{ChannelBuilder, OperationError, OwnedResult, PreparedChannel, WorkRequest};
use crate::connect::handshake::Handshake;
use crate::connect::tcp::{AsyncStream, ExchangeError, Role, exchange_over};
use crate::serve::event_loop::{Detached, LoopBuffer, step};
use crate::serve::pool::PooledBuffer;
use crate::verbs::memory::ScatterBuffer;
use crate::verbs::operation::{ReceiveWorkRequest, SendQueueRequest};
use crate::verbs::queue_pair::QueuePairEndpoint;

/// What an [`AsyncChannel`](crate::AsyncChannel) carries out as one operation: a request of the send queue that owns
/// its buffer. `B` is what its reactor keeps. Sealed.
#[diagnostic::on_unimplemented(
    message = "an `AsyncChannel` cannot carry out `{Self}`",
    label = "a request of the send queue is needed here, whose buffer is a `{B}`, such as `SendWorkRequest::new(buffer)`",
    note = "channels whose reactor has an `AnyBuffer` for a buffer keep buffers of every type"
)]
pub trait AsyncRequest<B>: sealed::Request<B> {}

#[diagnostic::do_not_recommend]
impl<B, R: WorkRequest<Kept: LoopBuffer<B>> + SendQueueRequest> AsyncRequest<B> for R {}

pub(super) mod sealed {
    use std::task::Waker;

    use super::*;
    use crate::serve::event_loop::{ChannelId, Loop};

    pub trait Request<B>: Sized {
        fn post(
            self,
            core: &mut Loop<'static, B>,
            channel: ChannelId,
            waker: &mut Option<Waker>,
        ) -> Result<u64, Refused<Self>>;

        fn refused(refused: Refused<Self>) -> OperationError<B>;
    }

    impl<B, R: WorkRequest<Kept: LoopBuffer<B>> + SendQueueRequest> Request<B> for R {
        #[inline(always)]
        fn post(
            self,
            core: &mut Loop<'static, B>,
            channel: ChannelId,
            waker: &mut Option<Waker>,
        ) -> Result<u64, Refused<Self>> {
            core.post_task(channel, self, waker)
        }

        #[cold]
        fn refused(refused: Refused<Self>) -> OperationError<B> {
            refused.into()
        }
    }
}

/// An [`AsyncChannel`] that is not connected: see [`Reactor::prepare`](crate::Reactor::prepare).
#[must_use]
pub struct PreparedAsyncChannel<S: Share = Locked<PooledBuffer>> {
    share: S,
    /// `None` once connected.
    detached: Option<Detached<'static>>,
}

impl<S: Share> PreparedAsyncChannel<S> {
    pub(super) fn new(share: &S, builder: ChannelBuilder<'static>) -> Result<Self> {
        let channel = builder.build()?;
        let mut guard = share.lock();
        let placed = guard.core.place(channel);
        guard.unlock();
        match placed {
            Ok(detached) => Ok(Self { share: share.clone(), detached: Some(detached) }),
            // Destroys the queue pair, outside the lock.
            Err(failed) => Err(failed.error),
        }
    }

    pub(super) fn channel(&self) -> &PreparedChannel<'static> {
        &self.detached.as_ref().expect("not connected").channel
    }

    pub(super) fn detached_mut(&mut self) -> &mut Detached<'static> {
        self.detached.as_mut().expect("not connected")
    }

    /// The channel's address, for the peer.
    pub fn endpoint(&self) -> QueuePairEndpoint {
        self.channel().endpoint()
    }

    /// `ibv_post_recv`: posts a receive before the channel is connected, so that even the peer's first message finds
    /// one. The channel hands the messages out by [`AsyncChannel::receive`], as if [`AsyncChannel::post_receive`] had
    /// posted them.
    ///
    /// A failed handshake drops the buffers, and so does a post that fails though the device may have it; post again
    /// for the next attempt. If this is dropped unconnected, so are the buffers, when the device is done with them.
    ///
    /// ```no_run
    /// # // not on Soft-RoCE alone: needs a peer
    /// # async fn serve<S: ibverbs::tcp::AsyncStream + Send>(reactor: &ibverbs::Reactor, domain: &std::sync::Arc<ibverbs::ProtectionDomain<'static>>, pool: &ibverbs::BufferPool, mut stream: S) -> Result<(), Box<dyn std::error::Error>> {
    /// let mut prepared = reactor.prepare(ibverbs::Channel::builder(domain).max_recv_wr(16))?;
    /// for _ in 0..16 {
    ///     prepared.post_receive(pool.take().ok_or("all buffers are in use")?)?;
    /// }
    /// let (channel, _) = prepared.accept(&mut stream, b"").await?;
    /// let (first, success) = channel.receive(pool.take().ok_or("all buffers are in use")?).await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`Loop::post`](crate::Loop::post), with the buffer, and those of a transition to INIT:
    ///
    ///  - [`Verbs`](crate::TransportError::Verbs): `EOPNOTSUPP` on iWARP, where the connection manager's
    ///    [`PendingConnection`](crate#by-ip-address-through-the-connection-manager) takes receives.
    #[doc(alias = "ibv_post_recv")]
    pub fn post_receive<D: ScatterBuffer>(&mut self, buffer: D) -> OwnedResult<S::Buffer, ()>
    where
        D::Kept: LoopBuffer<S::Buffer>,
    {
        let request = ReceiveWorkRequest::new(buffer);
        if let Err(error) = self.advance(Link::open_receives) {
            return Err(Refused::new(error.into(), Some(request)).into());
        }
        let Self { share, detached } = self;
        let detached = detached.as_ref().expect("not connected");
        let mut guard = share.lock();
        guard.core.open_for_receives(detached);
        let posted = guard.core.post_for_message(detached.id, request);
        guard.unlock();
        if posted.as_ref().is_err_and(|refused| refused.request.is_none()) && detached.try_reset() {
            // The device may have the receive, and its message would be lost.
            self.forget();
        }
        Ok(posted?)
    }

    fn advance(&mut self, next: impl FnOnce(&mut Link<'static>) -> Result<()>) -> Result<()> {
        let (done, has_ended) = step(&mut self.detached_mut().channel.link, next);
        if has_ended {
            self.forget();
        }
        done
    }

    fn forget(&mut self) {
        let id = self.detached_mut().id;
        let mut guard = self.share.lock();
        guard.core.forget_attempt(id);
        release_quietly(guard);
    }

    /// `ibv_modify_qp`: connects the channel to the peer's. See [`PreparedChannel::handshake`].
    ///
    /// # Errors
    ///
    /// Those of [`PreparedChannel::handshake`]. The channel comes back in the [`StateError`] for another attempt.
    #[doc(alias = "ibv_modify_qp")]
    pub fn handshake(self, remote: QueuePairEndpoint) -> Result<AsyncChannel<S>, StateError<Self>> {
        Handshake::handshake(self, remote).map(Self::finish)
    }

    /// Connects to the peer that accepts over the same stream, by [`accept`](Self::accept) or
    /// [`PreparedChannel::accept_over`]. Returns the channel and the peer's private data.
    ///
    /// The caller keeps the stream. The channel has a duplicate of its [socket](AsyncStream::socket): when the peer closes
    /// its end, as it does when it dies, all operations end with [`PeerGone`](crate::TransportError::PeerGone). There is no deadline: drop
    /// the future when the program's own timer says so. That destroys the queue pair, and leaves the stream in an
    /// unspecified state.
    ///
    /// Connecting calls `ibv_modify_qp`: the thread may wait while the kernel looks up the peer's MAC address.
    ///
    /// # Errors
    ///
    /// See [`ExchangeError`]. The channel comes back in the [`StateError`], for another attempt over another stream;
    /// its [endpoint](Self::endpoint) may have changed. Close the stream.
    pub fn connect<'a, T: AsyncStream + Send>(
        self,
        stream: &'a mut T,
        private_data: &[u8],
    ) -> impl Future<Output = Connected<S>> + use<'a, S, T> {
        self.exchange(Role::Connects, stream, private_data)
    }

    /// Connects to the peer that [connects](Self::connect) over the same stream.
    ///
    /// # Errors
    ///
    /// Those of [`connect`](Self::connect).
    pub fn accept<'a, T: AsyncStream + Send>(
        self,
        stream: &'a mut T,
        private_data: &[u8],
    ) -> impl Future<Output = Connected<S>> + use<'a, S, T> {
        self.exchange(Role::Accepts, stream, private_data)
    }

    fn attach(mut self, is_connected: bool) -> AsyncChannel<S> {
        let number = self.endpoint().num();
        let detached = self.detached.take().expect("not connected");
        let mut guard = self.share.lock();
        let id = guard.core.attach(detached, is_connected);
        guard.connected();
        let channel = AsyncChannel { share: self.share.clone(), id, number };
        drop(guard);
        channel
    }

    fn exchange<'a, T: AsyncStream + Send>(
        self,
        role: Role,
        stream: &'a mut T,
        private_data: &[u8],
    ) -> impl Future<Output = Connected<S>> + use<'a, S, T> {
        let private_data = private_data.to_vec();
        async move { exchange_over(self, role, stream, &private_data).await }
    }
}

type Connected<S> =
    Result<(AsyncChannel<S>, Vec<u8>), StateError<PreparedAsyncChannel<S>, ExchangeError>>;

impl<S: Share> Handshake for PreparedAsyncChannel<S> {
    type Connected = AsyncChannel<S>;
    /// Attached once the peer has connected too.
    type Shaken = Self;

    fn endpoint(&self) -> QueuePairEndpoint {
        self.endpoint()
    }

    fn handshake(mut self, remote: QueuePairEndpoint) -> Result<Self, StateError<Self>> {
        match self.advance(|link| link.connect(&remote)) {
            Ok(()) => Ok(self),
            Err(error) => Err(StateError::new(self, error)),
        }
    }

    fn take_back(mut shaken: Self) -> Self {
        let number = shaken.endpoint().num();
        if shaken.detached_mut().reset() {
            shaken.forget();
            let Self { share, detached } = &shaken;
            share.lock().core.renew(detached.as_ref().expect("not connected"), number);
        }
        shaken
    }

    fn set_peer_keeps(shaken: &mut Self, keeps: bool) {
        shaken.detached_mut().channel.link.peer_keeps = keeps;
    }

    fn set_socket(&mut self, socket: Option<BorrowedFd<'_>>) -> Result<bool> {
        let sign = socket.map(of_socket).transpose()?;
        self.share.lock().core.prepare_watch(sign.as_deref())?;
        let keeps = sign.is_some();
        self.detached_mut().channel.link.sign = sign;
        Ok(keeps)
    }

    fn finish(shaken: Self) -> AsyncChannel<S> {
        shaken.attach(true)
    }

    #[cfg(feature = "rdmacm")]
    fn place(&self) -> (*mut ffi::ibv_context, QueuePairType) {
        self.channel().link.queue_pair().place()
    }

    #[cfg(feature = "rdmacm")]
    fn into_connected(mut self) -> AsyncChannel<S> {
        // Nothing in it fails.
        let _ = self.advance(|link| {
            link.open_receives_of_init();
            Ok(())
        });
        self.attach(false)
    }
}

impl<S: Share> Drop for PreparedAsyncChannel<S> {
    fn drop(&mut self) {
        if let Some(detached) = self.detached.take() {
            let mut guard = self.share.lock();
            let detached = guard.core.give_up(detached);
            release_quietly(guard);
            destroy(&self.share, detached);
        }
    }
}

debug! { impl[S: Share] PreparedAsyncChannel<S>, self, endpoint: self.endpoint(), .. }
