//! A channel whose operations are futures.

mod connect;
#[cfg(feature = "rdmacm")]
mod connection_manager;
#[cfg(all(test, ibverbs_loom))]
mod every_order;
mod handover;
mod line;
mod operation;
mod receive;
mod receive_shared;
mod shutdown;
mod state;
mod user;

use connect::Connected;
pub use connect::{AsyncConnect, PreparedAsyncChannel};
pub use operation::AsyncOperation;
pub use receive::AsyncReceive;
pub use receive_shared::AsyncSharedReceive;
pub use shutdown::AsyncShutdown;
pub(super) use state::Shared;
use user::User;

use std::fmt;
use std::future::Future;
use std::sync::Arc;

use super::pool::PooledBuffer;
use super::reactor::Registry;
use crate::channel::{
    OperationError, OwnedBuffer, OwnedResult, SharedReceives, TransportError, WorkRequest, nowhere,
};
use crate::memory::{GatherBuffer, RemoteMemoryRegion, ScatterBuffer};
use crate::operation::{ReadWorkRequest, SendQueueRequest, SendWorkRequest, WriteWorkRequest};

/// A channel whose operations are futures that own their buffers. It is driven by a
/// [`Reactor`](crate::Reactor), and tied to no runtime.
///
/// [`Reactor::prepare`](crate::Reactor::prepare) makes one. Its methods take `&self`: any number of tasks
/// can use it.
///
/// # Cancelling
///
/// A future may be dropped at any time. The device may then still use the buffer, so what happens depends
/// on how far the operation has come:
///
/// | dropped | the operation | the buffer |
/// |---|---|---|
/// | before its first poll, or while it waits for room in the queue | is never posted | is dropped with the future |
/// | after that | goes on: a message is sent, a write takes effect | is dropped when the device is done with it (a pooled buffer goes back to its pool) |
/// | a receive | its place in line is given up. **No message is lost**: what arrives in its buffer goes to the next receive, in order | holds the next message |
///
/// No drop waits for the device. A future that is forgotten ([`mem::forget`](std::mem::forget)) is as sound
/// as one that is dropped, but it leaks: its operation goes on, and its buffer, its place in the queue and
/// the channel's memory are never given back. If it waited for room, all later operations wait behind it
/// until the channel is shut down.
///
/// # When it ends
///
/// After a failed operation ([`Work`](TransportError::Work)) all later ones fail too; make a new channel to
/// connect again. Dropping the channel ends everything that is in flight without waiting; the reactor then
/// destroys the queue pair. Futures that are left return [`Stopped`](TransportError::Stopped), with their
/// buffers.
pub struct AsyncChannel {
    shared: User,
    number: u32,
}

impl AsyncChannel {
    fn new(connected: Connected, registry: &Arc<Registry>, token: u64) -> Self {
        let number = connected.channel.number();
        let shared = Arc::new(Shared::new(connected, registry.clone(), token));
        registry.connect(token, &shared);
        shared.alarm();
        Self { shared: User::new(&shared), number }
    }

    /// The number of the queue pair.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// The number of messages that may be sent before the peer is asked again: see
    /// [`Channel::credits`](crate::Channel::credits).
    pub fn credits(&self) -> Option<u32> {
        self.shared.with(|state| state.channel.credits())
    }

    /// `ibv_post_send`: carries out any request of the send queue whose buffer an operation can own.
    ///
    /// ```
    /// # let rxe0 = ibverbs_software::Device::builder().name("rxe0").build().unwrap();
    /// # rxe0.register();
    /// use ibverbs::{AsyncChannel, OperationError, PooledBuffer, SendWorkRequest};
    ///
    /// async fn answer(
    ///     channel: &AsyncChannel,
    ///     text: PooledBuffer,
    /// ) -> Result<PooledBuffer, OperationError<PooledBuffer>> {
    ///     let (text, _) = channel.run(SendWorkRequest::new(text).immediate(7)).await?;
    ///     Ok(text)
    /// }
    /// ```
    ///
    /// Messages are received by [`receive`](Self::receive), which hands them out in order.
    #[doc(alias = "ibv_post_send")]
    pub fn run<R: WorkRequest + SendQueueRequest>(&self, request: R) -> AsyncOperation<R>
    where
        R::Kept: OwnedBuffer,
    {
        AsyncOperation::new(&self.shared, request)
    }

    /// `ibv_post_send`: sends a message. See [`SendWorkRequest`].
    #[doc(alias = "ibv_post_send")]
    pub fn send<D: GatherBuffer>(&self, message: D) -> AsyncOperation<SendWorkRequest<D>>
    where
        D::Kept: OwnedBuffer,
    {
        self.run(SendWorkRequest::new(message))
    }

    /// `ibv_post_send`: writes to the peer's memory. See [`WriteWorkRequest`].
    #[doc(alias = "ibv_post_send")]
    pub fn write<D: GatherBuffer>(
        &self,
        data: D,
        remote: impl Into<RemoteMemoryRegion>,
    ) -> AsyncOperation<WriteWorkRequest<D>>
    where
        D::Kept: OwnedBuffer,
    {
        self.run(WriteWorkRequest::new(data, remote))
    }

    /// `ibv_post_send`: reads the peer's memory. See [`ReadWorkRequest`].
    #[doc(alias = "ibv_post_send")]
    pub fn read<D: ScatterBuffer>(
        &self,
        buffer: D,
        remote: impl Into<RemoteMemoryRegion>,
    ) -> AsyncOperation<ReadWorkRequest<D>>
    where
        D::Kept: OwnedBuffer,
    {
        self.run(ReadWorkRequest::new(buffer, remote))
    }

    /// `ibv_post_send`: writes 0 bytes to the peer, whose device acknowledges that without the peer's program. An
    /// error says that the peer is gone, after the retries of the device.
    ///
    /// The peer's channel must allow remote writes: see [`Channel::keep_alive`](crate::Channel::keep_alive).
    #[doc(alias = "ibv_post_send")]
    pub fn probe(&self) -> AsyncOperation<WriteWorkRequest<()>> {
        self.write((), nowhere())
    }

    /// [Probes](Self::probe) the peer after each `sleep` that ends while no send, write, read or atomic is in
    /// flight. It returns when the connection has failed, with the reason. Run it beside the other operations, in a
    /// task of its own or with the runtime's `select!`; dropping it is harmless.
    ///
    /// ```
    /// # let rxe0 = ibverbs_software::Device::builder().name("rxe0").build().unwrap();
    /// # rxe0.register();
    /// # async fn sleep(_: Duration) {}
    /// use std::time::Duration;
    ///
    /// # async fn watch(channel: std::sync::Arc<ibverbs::AsyncChannel>) {
    /// // `sleep` is the runtime's, such as `tokio::time::sleep`.
    /// let error = channel.keep_alive(|| sleep(Duration::from_secs(5))).await;
    /// eprintln!("the peer is gone: {error}");
    /// # }
    /// ```
    pub async fn keep_alive<S: Future>(&self, mut sleep: impl FnMut() -> S) -> TransportError {
        loop {
            sleep().await;
            let is_idle = self.shared.with(|state| state.channel.outstanding_sends() == 0);
            if is_idle && let Err(failed) = self.probe().await {
                return failed.error;
            }
        }
    }

    /// `ibv_post_recv`: the next message. Messages are handed out in the order in which they arrive.
    ///
    /// The future gives `buffer` to the channel and gets the buffer with the message. That is mostly the
    /// same one, but it may be one of an earlier receive that was dropped, or one of
    /// [`post_receive`](Self::post_receive); `buffer` then takes its place, or is dropped if it is not
    /// needed.
    ///
    /// A message that is longer than the buffer it arrives in fails, so use buffers of one length. If as
    /// many receives are posted as the channel was built for, further buffers wait until there is room.
    #[doc(alias = "ibv_post_recv")]
    pub fn receive(&self, buffer: PooledBuffer) -> AsyncReceive {
        AsyncReceive::new(&self.shared, buffer)
    }

    /// `ibv_post_recv`: posts a receive for a message that nobody waits for yet. From then on the channel
    /// keeps one more receive posted than there are tasks that wait, so that the peer need not wait for
    /// the program to come back to [`receive`](Self::receive).
    ///
    /// # Errors
    ///
    /// [Those of posting](crate::Scope#errors), with the buffer.
    #[doc(alias = "ibv_post_recv")]
    pub fn post_receive(&self, buffer: PooledBuffer) -> OwnedResult<PooledBuffer, ()> {
        self.shared.with(|state| {
            if let Some(error) = state.refusal() {
                return Err(OperationError { error, buffer: Some(buffer) });
            }
            let work = match state.channel.post_task_receive(buffer) {
                Ok(work) => work,
                Err(refused) => {
                    state.post_failed(refused.error);
                    return Err(refused);
                }
            };
            state.posted.push_back(work);
            state.ahead += 1;
            Ok(())
        })
    }

    /// The next message of a channel that was
    /// [built with](crate::ChannelBuilder::shared_receive_queue) these receives. Messages are handed out in the
    /// order in which they arrive. [`SharedReceives::post`] posts the buffers that they arrive in.
    ///
    /// A connection that fails while nothing is in flight but receives of the shared queue raises no completion.
    /// [`AsyncEvents`](crate::AsyncEvents) tell it
    /// ([`LastRequestReached`](crate::AsyncEventKind::LastRequestReached)).
    pub fn receive_shared<B: OwnedBuffer>(
        &self,
        receives: &SharedReceives<B>,
    ) -> AsyncSharedReceive<B> {
        AsyncSharedReceive::new(&self.shared, receives)
    }

    /// Waits until all sends, writes, reads and atomics that were posted have ended, then ends everything
    /// else. Operations that were not posted yet, and later ones, fail with
    /// [`Stopped`](TransportError::Stopped). Messages that have arrived can still be
    /// [received](Self::receive).
    ///
    /// The peer is not told. If this is dropped before it has ended, operations in flight go on, and no
    /// new ones are posted.
    pub fn shutdown(&self) -> AsyncShutdown {
        AsyncShutdown::new(&self.shared)
    }
}

impl Drop for AsyncChannel {
    /// Ends everything that is in flight, without waiting. The reactor destroys the queue pair.
    fn drop(&mut self) {
        if let Err(shared) = self.shared.registry.close(self.shared.clone()) {
            // The reactor is gone.
            shared.end(TransportError::Stopped).forget();
        }
    }
}

impl fmt::Debug for AsyncChannel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AsyncChannel").field("number", &self.number).finish_non_exhaustive()
    }
}
