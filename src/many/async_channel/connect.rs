//! Asynchronous channels that are not connected yet, and connecting them.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use super::AsyncChannel;
use crate::channel::{ChannelBuilder, PreparedChannel};
use crate::connect::tcp::{AsyncStream, ExchangeError, Polled, Role, exchange_over};
use crate::error::Result;
use crate::many::reactor::Registry;
use crate::queue_pair::QueuePairEndpoint;
use crate::state_error::StateError;

/// An [`AsyncChannel`] that is not connected, with the address that the peer needs: see
/// [`Reactor::prepare`](crate::Reactor::prepare).
#[must_use]
pub struct PreparedAsyncChannel {
    prepared: PreparedChannel<'static>,
    place: Place,
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
        let builder = builder.shared_completion_queue(registry.queue()).token(token);
        Ok(Self { prepared: builder.build()?, place })
    }

    /// The address of the channel, which the peer needs.
    pub fn endpoint(&self) -> QueuePairEndpoint {
        self.prepared.endpoint()
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
        let Self { prepared, mut place } = self;
        match prepared.handshake(remote) {
            Ok(channel) => {
                place.taken = true;
                Ok(AsyncChannel::new(channel, &place.registry, place.token))
            }
            Err(failed) => Err(failed.map(|prepared| Self { prepared, place })),
        }
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
        let exchanging = async move {
            let Self { prepared, mut place } = self;
            let mut stream = Polled(stream);
            match exchange_over(prepared, role, &mut stream, &private_data).await {
                Ok((channel, theirs)) => {
                    place.taken = true;
                    Ok((AsyncChannel::new(channel, &place.registry, place.token), theirs))
                }
                Err(failed) => Err(failed.map(|prepared| Self { prepared, place })),
            }
        };
        AsyncConnect { exchanging: Box::pin(exchanging) }
    }
}

impl fmt::Debug for PreparedAsyncChannel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PreparedAsyncChannel")
            .field("prepared", &self.prepared)
            .finish_non_exhaustive()
    }
}

/// The channel and the peer's private data, or what is not connected.
type Connected = Result<(AsyncChannel, Vec<u8>), StateError<PreparedAsyncChannel, ExchangeError>>;

/// Connects an asynchronous channel: see [`PreparedAsyncChannel::connect`] and
/// [`accept`](PreparedAsyncChannel::accept). Dropping it destroys the queue pair.
#[must_use = "futures do nothing unless polled"]
pub struct AsyncConnect<'a> {
    exchanging: Pin<Box<dyn Future<Output = Connected> + Send + 'a>>,
}

impl Future for AsyncConnect<'_> {
    type Output = Connected;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Connected> {
        self.exchanging.as_mut().poll(cx)
    }
}

impl fmt::Debug for AsyncConnect<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AsyncConnect").finish_non_exhaustive()
    }
}
