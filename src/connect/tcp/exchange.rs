//! The exchange between two sides over one stream.

use std::time::Instant;

use super::error::ExchangeError;
use super::stream::{DeadlineStream, Timed};
use super::wire;
use crate::channel::{Channel, PreparedChannel};
use crate::error::Error;
use crate::queue_pair::{PreparedQueuePair, QueuePair, QueuePairEndpoint};

/// Which of the two sides begins.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Role {
    Connects,
    Accepts,
}

/// What can be connected: a prepared queue pair or channel.
pub(super) trait Prepared {
    type Connected;

    fn endpoint(&self) -> QueuePairEndpoint;

    fn handshake(self, remote: QueuePairEndpoint) -> Result<Self::Connected, Error>;
}

impl<'res> Prepared for PreparedQueuePair<'res> {
    type Connected = QueuePair<'res>;

    fn endpoint(&self) -> QueuePairEndpoint {
        self.endpoint()
    }

    fn handshake(self, remote: QueuePairEndpoint) -> Result<QueuePair<'res>, Error> {
        self.handshake(remote)
    }
}

impl<'res> Prepared for PreparedChannel<'res> {
    type Connected = Channel<'res>;

    fn endpoint(&self) -> QueuePairEndpoint {
        self.endpoint()
    }

    fn handshake(self, remote: QueuePairEndpoint) -> Result<Channel<'res>, Error> {
        self.handshake(remote)
    }
}

/// Connects over the stream. Returns the connected object and the peer's private data.
pub(super) fn exchange<P: Prepared, S: DeadlineStream + ?Sized>(
    prepared: P,
    role: Role,
    mut stream: &mut S,
    private_data: &[u8],
    deadline: Instant,
) -> Result<(P::Connected, Vec<u8>), ExchangeError> {
    let greeting = wire::greeting(&prepared.endpoint(), private_data)?;
    let mut stream = Timed::new(&mut stream, deadline);
    let theirs = match role {
        Role::Connects => {
            stream.write(&greeting)?;
            read_greeting(&mut stream)
        }
        Role::Accepts => {
            let theirs = read_greeting(&mut stream);
            // Tell a peer of another version our version. Tell other programs nothing.
            if matches!(theirs, Ok(_) | Err(ExchangeError::Version { .. })) {
                stream.write(&greeting)?;
            }
            theirs
        }
    };
    let (remote, theirs) = theirs?;
    let connected = match prepared.handshake(remote) {
        Ok(connected) => connected,
        Err(error) => {
            // If the peer does not receive this, it will see the end of the stream.
            let told = stream.write(&wire::verdict(Some(error.raw_os_error())));
            if role == Role::Accepts && told.is_ok() {
                // Read the peer's verdict: closing a TCP socket with unread data may lose our own.
                let _ = stream.read(&mut [0; wire::VERDICT]);
            }
            return Err(error.into());
        }
    };
    if role == Role::Connects {
        stream.write(&wire::verdict(None))?;
    }
    let mut verdict = [0; wire::VERDICT];
    stream.read(&mut verdict)?;
    wire::read_verdict(verdict)?;
    if role == Role::Accepts {
        stream.write(&wire::verdict(None))?;
    }
    Ok((connected, theirs))
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
