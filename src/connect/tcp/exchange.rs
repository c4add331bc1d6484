//! The exchange between two sides over one stream.
//!
//! It is written once, as a future over [`Messages`]. Over a stream that blocks, the future is never pending.

use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::Instant;

use super::error::ExchangeError;
use super::stream::{DeadlineStream, Timed};
use super::wire;
use crate::connect::handshake::Handshake;
use crate::queue_pair::QueuePairEndpoint;
use crate::state_error::StateError;

/// Which of the two sides begins.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Role {
    Connects,
    Accepts,
}

/// What an exchange returns: the connected object and the peer's private data, or the object that is not
/// connected.
pub(crate) type Exchanged<P> =
    Result<(<P as Handshake>::Connected, Vec<u8>), StateError<P, ExchangeError>>;

/// Whole messages over a stream.
pub(crate) trait Messages {
    /// Fills `bytes`.
    fn read(&mut self, bytes: &mut [u8]) -> impl Future<Output = Result<(), ExchangeError>> + Send;

    /// Sends all of `bytes` on its way.
    fn write(&mut self, bytes: &[u8]) -> impl Future<Output = Result<(), ExchangeError>> + Send;
}

/// A stream that blocks.
struct Blocking<'s, S: DeadlineStream>(Timed<'s, S>);

impl<S: DeadlineStream> Messages for Blocking<'_, S> {
    fn read(&mut self, bytes: &mut [u8]) -> impl Future<Output = Result<(), ExchangeError>> + Send {
        std::future::ready(self.0.read(bytes))
    }

    fn write(&mut self, bytes: &[u8]) -> impl Future<Output = Result<(), ExchangeError>> + Send {
        std::future::ready(self.0.write(bytes))
    }
}

/// Connects over a stream that blocks.
pub(super) fn exchange<P: Handshake, S: DeadlineStream + ?Sized>(
    prepared: P,
    role: Role,
    mut stream: &mut S,
    private_data: &[u8],
    deadline: Instant,
) -> Exchanged<P> {
    let mut stream = Blocking(Timed::new(&mut stream, deadline));
    let mut exchanging = pin!(exchange_over(prepared, role, &mut stream, private_data));
    loop {
        // Ready at once, because each read and write blocks until it is done.
        let polled = exchanging.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        if let Poll::Ready(exchanged) = polled {
            return exchanged;
        }
    }
}

/// Connects over a stream.
pub(crate) async fn exchange_over<P: Handshake, S: Messages>(
    prepared: P,
    role: Role,
    stream: &mut S,
    private_data: &[u8],
) -> Exchanged<P> {
    let endpoint = prepared.endpoint();
    let greeted = greet(stream, role, &endpoint, private_data).await;
    let (remote, theirs) = match greeted {
        Ok(theirs) => theirs,
        Err(error) => return Err(StateError::new(prepared, error)),
    };
    let shaken = match prepared.handshake(remote) {
        Ok(shaken) => shaken,
        Err(failed) => {
            // If the peer does not receive this, it will see the end of the stream.
            let written = stream.write(&wire::verdict(Some(failed.error.errno()))).await;
            if role == Role::Accepts && written.is_ok() {
                // Read the peer's verdict: closing a TCP socket with unread data may lose our own.
                let _ = stream.read(&mut [0; wire::VERDICT]).await;
            }
            return Err(failed.map(|prepared| prepared));
        }
    };
    match exchange_verdicts(stream, role).await.map_err(ExchangeError::of_peer) {
        Ok(()) => Ok((P::finish(shaken), theirs)),
        Err(error) => Err(StateError::new(P::take_back(shaken), error)),
    }
}

/// Exchanges the greetings. Returns the endpoint and the private data of the peer.
async fn greet<S: Messages>(
    stream: &mut S,
    role: Role,
    endpoint: &QueuePairEndpoint,
    private_data: &[u8],
) -> Result<(QueuePairEndpoint, Vec<u8>), ExchangeError> {
    let greeting = wire::greeting(endpoint, private_data)?;
    match role {
        Role::Connects => {
            stream.write(&greeting).await?;
            read_greeting(stream).await
        }
        Role::Accepts => {
            let theirs = read_greeting(stream).await;
            // Tell a peer of another version our version. Tell other programs nothing.
            if matches!(theirs, Ok(_) | Err(ExchangeError::Version { .. })) {
                stream.write(&greeting).await?;
            }
            theirs
        }
    }
}

/// Tells the peer that this side is ready, and waits until the peer is.
async fn exchange_verdicts<S: Messages>(stream: &mut S, role: Role) -> Result<(), ExchangeError> {
    if role == Role::Connects {
        stream.write(&wire::verdict(None)).await?;
    }
    let mut verdict = [0; wire::VERDICT];
    stream.read(&mut verdict).await?;
    wire::read_verdict(verdict)?;
    if role == Role::Accepts {
        stream.write(&wire::verdict(None)).await?;
    }
    Ok(())
}

/// The endpoint and the private data of the peer.
async fn read_greeting<S: Messages>(
    stream: &mut S,
) -> Result<(QueuePairEndpoint, Vec<u8>), ExchangeError> {
    let mut header = [0; wire::HEADER];
    stream.read(&mut header).await?;
    let header = wire::Header::parse(&header)?;
    // Read to the end even if the endpoint is refused: when a TCP socket is closed with unread data, the
    // peer may lose the last data that was sent to it.
    let mut bytes = vec![0; header.endpoint + header.private_data];
    stream.read(&mut bytes).await?;
    header.check()?;
    let private_data = bytes.split_off(header.endpoint);
    Ok((wire::endpoint(&header, &bytes)?, private_data))
}
