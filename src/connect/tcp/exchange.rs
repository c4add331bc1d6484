//! The exchange between two sides over one stream.

use std::time::Instant;

use super::error::ExchangeError;
use super::stream::{DeadlineStream, Timed};
use super::wire;
use crate::channel::{Channel, PreparedChannel};
use crate::queue_pair::{PreparedQueuePair, QueuePair, QueuePairEndpoint};
use crate::state_error::StateError;

/// Which of the two sides begins.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Role {
    Connects,
    Accepts,
}

/// What can be connected: a prepared queue pair or channel.
pub(super) trait Prepared: Sized {
    type Connected;

    fn endpoint(&self) -> QueuePairEndpoint;

    fn handshake(self, remote: QueuePairEndpoint) -> Result<Self::Connected, StateError<Self>>;

    /// Takes a connected object back, so that it can be connected again.
    fn take_back(connected: Self::Connected) -> Self;
}

impl<'res> Prepared for PreparedQueuePair<'res> {
    type Connected = QueuePair<'res>;

    fn endpoint(&self) -> QueuePairEndpoint {
        self.endpoint()
    }

    fn handshake(self, remote: QueuePairEndpoint) -> Result<QueuePair<'res>, StateError<Self>> {
        self.handshake(remote)
    }

    fn take_back(connected: QueuePair<'res>) -> Self {
        connected.into_prepared()
    }
}

impl<'res> Prepared for PreparedChannel<'res> {
    type Connected = Channel<'res>;

    fn endpoint(&self) -> QueuePairEndpoint {
        self.endpoint()
    }

    fn handshake(self, remote: QueuePairEndpoint) -> Result<Channel<'res>, StateError<Self>> {
        self.handshake(remote)
    }

    fn take_back(connected: Channel<'res>) -> Self {
        connected.into_prepared()
    }
}

/// What an exchange returns: the connected object and the peer's private data, or the object that is not
/// connected.
pub(super) type Exchanged<P> =
    Result<(<P as Prepared>::Connected, Vec<u8>), StateError<P, ExchangeError>>;

/// Connects over the stream.
pub(super) fn exchange<P: Prepared, S: DeadlineStream + ?Sized>(
    prepared: P,
    role: Role,
    mut stream: &mut S,
    private_data: &[u8],
    deadline: Instant,
) -> Exchanged<P> {
    let mut stream = Timed::new(&mut stream, deadline);
    let greeted = greet(&mut stream, role, &prepared.endpoint(), private_data);
    let (remote, theirs) = match greeted {
        Ok(theirs) => theirs,
        Err(error) => return Err(StateError::new(prepared, error)),
    };
    let connected = match prepared.handshake(remote) {
        Ok(connected) => connected,
        Err(failed) => {
            // If the peer does not receive this, it will see the end of the stream.
            let told = stream.write(&wire::verdict(Some(failed.error.raw_os_error())));
            if role == Role::Accepts && told.is_ok() {
                // Read the peer's verdict: closing a TCP socket with unread data may lose our own.
                let _ = stream.read(&mut [0; wire::VERDICT]);
            }
            return Err(failed.map(|prepared| prepared));
        }
    };
    match exchange_verdicts(&mut stream, role) {
        Ok(()) => Ok((connected, theirs)),
        Err(error) => Err(StateError::new(P::take_back(connected), error)),
    }
}

/// Exchanges the greetings. Returns the endpoint and the private data of the peer.
fn greet<S: DeadlineStream>(
    stream: &mut Timed<'_, S>,
    role: Role,
    endpoint: &QueuePairEndpoint,
    private_data: &[u8],
) -> Result<(QueuePairEndpoint, Vec<u8>), ExchangeError> {
    let greeting = wire::greeting(endpoint, private_data)?;
    match role {
        Role::Connects => {
            stream.write(&greeting)?;
            read_greeting(stream)
        }
        Role::Accepts => {
            let theirs = read_greeting(stream);
            // Tell a peer of another version our version. Tell other programs nothing.
            if matches!(theirs, Ok(_) | Err(ExchangeError::Version { .. })) {
                stream.write(&greeting)?;
            }
            theirs
        }
    }
}

/// Tells the peer that this side is ready, and waits until the peer is.
fn exchange_verdicts<S: DeadlineStream>(
    stream: &mut Timed<'_, S>,
    role: Role,
) -> Result<(), ExchangeError> {
    if role == Role::Connects {
        stream.write(&wire::verdict(None))?;
    }
    let mut verdict = [0; wire::VERDICT];
    stream.read(&mut verdict)?;
    wire::read_verdict(verdict)?;
    if role == Role::Accepts {
        stream.write(&wire::verdict(None))?;
    }
    Ok(())
}

/// The endpoint and the private data of the peer.
fn read_greeting<S: DeadlineStream>(
    stream: &mut Timed<'_, S>,
) -> Result<(QueuePairEndpoint, Vec<u8>), ExchangeError> {
    let mut header = [0; wire::HEADER];
    stream.read(&mut header)?;
    let header = wire::Header::parse(&header)?;
    // Read to the end even if the endpoint is refused: when a TCP socket is closed with unread data, the
    // peer may lose the last data that was sent to it.
    let mut bytes = vec![0; header.endpoint + header.private_data];
    stream.read(&mut bytes)?;
    header.check()?;
    let private_data = bytes.split_off(header.endpoint);
    Ok((wire::endpoint(&bytes)?, private_data))
}
