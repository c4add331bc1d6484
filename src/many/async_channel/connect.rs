//! Asynchronous channels that are not connected yet, and connecting them.

use std::collections::VecDeque;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use super::AsyncChannel;
#[cfg(feature = "rdmacm")]
use super::state::State;
use crate::channel::{Channel, ChannelBuilder, OwnedResult, OwnedWork, PreparedChannel};
use crate::completion::WorkSuccess;
use crate::connect::Handshake;
use crate::connect::tcp::{AsyncStream, ExchangeError, Polled, Role, exchange_over};
use crate::debug::debug;
use crate::error::Result;
#[cfg(feature = "rdmacm")]
use crate::ffi;
use crate::many::pool::PooledBuffer;
use crate::many::reactor::Registry;
use crate::queue_pair::QueuePairEndpoint;
#[cfg(feature = "rdmacm")]
use crate::queue_pair_state::QueuePairType;
use crate::state_error::StateError;

/// An [`AsyncChannel`] that is not connected, with the address that the peer needs: see
/// [`Reactor::prepare`](crate::Reactor::prepare).
#[must_use]
pub struct PreparedAsyncChannel {
    receiving: Receiving,
    place: Place,
}

/// A channel that is not connected, and its receives.
struct Receiving {
    prepared: PreparedChannel<'static>,
    /// Those that were posted, in order.
    posted: VecDeque<OwnedWork<PooledBuffer>>,
    /// Buffers of receives that a failed attempt has ended. The next attempt posts them again.
    held: VecDeque<PooledBuffer>,
}

/// A channel that is connected, and the receives that were posted before.
pub(super) struct Connected {
    pub(super) channel: Channel<'static>,
    pub(super) posted: VecDeque<OwnedWork<PooledBuffer>>,
    /// Buffers that could not be posted.
    pub(super) held: VecDeque<PooledBuffer>,
}

impl Receiving {
    fn post(&mut self, buffer: PooledBuffer) -> OwnedResult<PooledBuffer, ()> {
        match self.prepared.post_task_receive(buffer) {
            Ok(work) => {
                self.posted.push_back(work);
                Ok(())
            }
            Err(refused) => {
                // It may have ended the others.
                self.take_ended();
                Err(refused)
            }
        }
    }

    /// Posts the buffers that a failed attempt has left. If that fails, the rest is left to the connected channel.
    fn post_held(&mut self) {
        for _ in 0..self.held.len() {
            let Some(buffer) = self.held.pop_front() else { return };
            if let Err(refused) = self.post(buffer) {
                return self.held.extend(refused.buffer);
            }
        }
    }

    /// Keeps the buffers of the receives that have ended.
    fn take_ended(&mut self) {
        let Self { prepared, posted, held } = self;
        take_ended(posted, held, |work| prepared.take_ended(work));
    }
}

/// Moves the buffers of receives that have ended to `held`. What they have received is of a connection that has failed.
fn take_ended(
    posted: &mut VecDeque<OwnedWork<PooledBuffer>>,
    held: &mut VecDeque<PooledBuffer>,
    mut take: impl FnMut(
        &mut OwnedWork<PooledBuffer>,
    ) -> OwnedResult<PooledBuffer, Option<(PooledBuffer, WorkSuccess)>>,
) {
    posted.retain_mut(|work| match take(work) {
        Ok(None) => true,
        Ok(Some((buffer, _))) => {
            held.push_back(buffer);
            false
        }
        Err(ended) => {
            held.extend(ended.buffer);
            false
        }
    });
}

/// A token of the reactor.
struct Place {
    registry: Arc<Registry>,
    token: u64,
    /// Whether a channel has the token.
    taken: bool,
}

impl Drop for Place {
    fn drop(&mut self) {
        if !self.taken {
            self.registry.release(self.token);
        }
    }
}

impl PreparedAsyncChannel {
    pub(crate) fn new(builder: ChannelBuilder<'static>, registry: &Arc<Registry>) -> Result<Self> {
        builder.check_never_sleeps()?;
        let token = registry.reserve();
        let place = Place { registry: registry.clone(), token, taken: false };
        let builder = builder.shared_completion_queue(registry.queue(), token);
        let prepared = builder.build()?;
        let receiving = Receiving { prepared, posted: VecDeque::new(), held: VecDeque::new() };
        Ok(Self { receiving, place })
    }

    /// The address of the channel, which the peer needs.
    pub fn endpoint(&self) -> QueuePairEndpoint {
        self.receiving.prepared.endpoint()
    }

    /// `ibv_post_recv`: posts a receive before the channel is connected, so that not even the first message of the
    /// peer comes before its receive. The channel hands the messages out by
    /// [`AsyncChannel::receive`], in order, and keeps as many receives posted as if they had been posted by
    /// [`AsyncChannel::post_receive`].
    ///
    /// If an attempt to connect fails, the receives stay, and so do their buffers: the next attempt posts those again
    /// that have ended. If what is not connected is dropped, the buffers go back to their pool.
    ///
    /// ```no_run
    /// # // not on Soft-RoCE alone: needs a peer
    /// # async fn serve<S: ibverbs::AsyncStream + Send>(reactor: &ibverbs::Reactor, domain: &std::sync::Arc<ibverbs::ProtectionDomain<'static>>, pool: &ibverbs::BufferPool, mut stream: S) -> Result<(), Box<dyn std::error::Error>> {
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
    /// Those of [`PreparedChannel::post_owned`](crate::PreparedChannel::post_owned), with the buffer.
    #[doc(alias = "ibv_post_recv")]
    pub fn post_receive(&mut self, buffer: PooledBuffer) -> OwnedResult<PooledBuffer, ()> {
        self.receiving.post_held();
        self.receiving.post(buffer)
    }

    /// `ibv_modify_qp`: connects the channel to the peer's. See
    /// [`PreparedChannel::handshake`](crate::PreparedChannel::handshake).
    ///
    /// # Errors
    ///
    /// Those of [`PreparedChannel::handshake`](crate::PreparedChannel::handshake). The channel comes back in the
    /// [`StateError`], for another attempt.
    #[doc(alias = "ibv_modify_qp")]
    pub fn handshake(self, remote: QueuePairEndpoint) -> Result<AsyncChannel, StateError<Self>> {
        Handshake::handshake(self, remote).map(Self::finish)
    }

    #[cfg(feature = "rdmacm")]
    pub(super) fn prepared(&self) -> &PreparedChannel<'static> {
        &self.receiving.prepared
    }

    #[cfg(feature = "rdmacm")]
    pub(super) fn prepared_mut(&mut self) -> &mut PreparedChannel<'static> {
        &mut self.receiving.prepared
    }

    /// Connects to the peer that [accepts](Self::accept) over the same stream, as
    /// [`PreparedChannel::connect_over`](crate::PreparedChannel::connect_over) does, with which it can be
    /// combined. Returns the channel and the peer's private data.
    ///
    /// The caller keeps the stream, and can read from it to notice that the peer is gone. There is no
    /// deadline: drop the future when the program's own timer says so. The stream is then in an unspecified
    /// state.
    ///
    /// Connecting calls `ibv_modify_qp`, for which the kernel may have to look up the peer's MAC address:
    /// the thread waits meanwhile.
    ///
    /// # Errors
    ///
    /// See [`ExchangeError`]. The channel comes back in the [`StateError`], for another attempt over another stream;
    /// its [endpoint](Self::endpoint) may have changed. Close the stream.
    pub fn connect<'a, S: AsyncStream + Send + 'a>(
        self,
        stream: &'a mut S,
        private_data: &[u8],
    ) -> AsyncConnect<'a> {
        self.exchange(Role::Connects, stream, private_data)
    }

    /// Connects to the peer that [connects](Self::connect) over the same stream.
    ///
    /// # Errors
    ///
    /// As [`connect`](Self::connect).
    pub fn accept<'a, S: AsyncStream + Send + 'a>(
        self,
        stream: &'a mut S,
        private_data: &[u8],
    ) -> AsyncConnect<'a> {
        self.exchange(Role::Accepts, stream, private_data)
    }

    fn exchange<'a, S: AsyncStream + Send + 'a>(
        self,
        role: Role,
        stream: &'a mut S,
        private_data: &[u8],
    ) -> AsyncConnect<'a> {
        let private_data = private_data.to_vec();
        let exchanging =
            async move { exchange_over(self, role, &mut Polled(stream), &private_data).await };
        AsyncConnect { exchanging: Box::pin(exchanging) }
    }
}

/// One whose peer may fail to connect. It gets its place when the peer has connected too.
#[cfg_attr(not(feature = "rdmacm"), expect(unreachable_pub, reason = "of `Connectable`"))]
pub struct Shaken {
    connected: Connected,
    place: Place,
}

debug! { Shaken, self, channel: self.connected.channel, .. }

impl Handshake for PreparedAsyncChannel {
    type Connected = AsyncChannel;
    type Shaken = Shaken;

    fn endpoint(&self) -> QueuePairEndpoint {
        self.endpoint()
    }

    fn handshake(self, remote: QueuePairEndpoint) -> Result<Shaken, StateError<Self>> {
        let Self { mut receiving, place } = self;
        receiving.post_held();
        let Receiving { prepared, mut posted, held } = receiving;
        match prepared.handshake(remote) {
            Ok(channel) => {
                // If an attempt could not reset the queue pair, it is not known which of its receives have ended.
                posted.retain(|work| work.is_of_channel(&channel));
                Ok(Shaken { connected: Connected { channel, posted, held }, place })
            }
            Err(failed) => {
                let mut receiving = Receiving { prepared: failed.object, posted, held };
                receiving.take_ended();
                Err(StateError::new(Self { receiving, place }, failed.error))
            }
        }
    }

    fn take_back(Shaken { connected, place }: Shaken) -> Self {
        let Connected { mut channel, mut posted, mut held } = connected;
        if !posted.is_empty() {
            channel.reset_tasks();
            take_ended(&mut posted, &mut held, |work| work.take_ended(&mut channel));
        }
        let receiving = Receiving { prepared: channel.into_prepared(), posted, held };
        Self { receiving, place }
    }

    fn finish(Shaken { connected, mut place }: Shaken) -> AsyncChannel {
        place.taken = true;
        AsyncChannel::new(connected, &place.registry, place.token)
    }

    #[cfg(feature = "rdmacm")]
    fn place(&self) -> (*mut ffi::ibv_context, QueuePairType) {
        self.receiving.prepared.queue_pair().place()
    }

    #[cfg(feature = "rdmacm")]
    fn into_connected(self) -> AsyncChannel {
        let Self { receiving: Receiving { prepared, posted, held }, place } = self;
        let channel = prepared.into_receiving();
        let connected = Connected { channel, posted, held };
        let channel = Self::finish(Shaken { connected, place });
        // Receives that a failed attempt has ended.
        channel.shared.with(State::fill);
        channel
    }
}

debug! { PreparedAsyncChannel, self, prepared: self.receiving.prepared, .. }

/// The channel and the peer's private data, or what is not connected.
type Output = Result<(AsyncChannel, Vec<u8>), StateError<PreparedAsyncChannel, ExchangeError>>;

/// Connects an asynchronous channel: see [`PreparedAsyncChannel::connect`] and
/// [`accept`](PreparedAsyncChannel::accept). Dropping it destroys the queue pair.
#[must_use = "futures do nothing unless polled"]
pub struct AsyncConnect<'a> {
    exchanging: Pin<Box<dyn Future<Output = Output> + Send + 'a>>,
}

impl Future for AsyncConnect<'_> {
    type Output = Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Output> {
        self.exchanging.as_mut().poll(cx)
    }
}

impl fmt::Debug for AsyncConnect<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AsyncConnect").finish_non_exhaustive()
    }
}
