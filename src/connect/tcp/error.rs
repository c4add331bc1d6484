//! Why two sides did not connect.

use std::fmt;
use std::io;

use crate::error::Error;
use crate::state_error::StateError;

/// Why `connect` or `accept` over a stream failed. The peer is told if it can be.
#[non_exhaustive]
pub enum ExchangeError {
    /// A verb failed on our side, or its input was wrong: our queue pair could not be connected.
    Verbs(Error),
    /// The peer could not connect its queue pair to ours: a verb failed there with this errno value.
    Peer {
        /// The errno value on the peer's machine.
        errno: i32,
    },
    /// The deadline passed before both sides were ready.
    TimedOut,
    /// The peer closed the stream, or died, before both sides were ready.
    Closed,
    /// The peer sent something else than this exchange: it is another program, or a faulty one.
    Protocol(&'static str),
    /// The peer speaks another version of the exchange: it uses another version of this crate.
    Version {
        /// The version that this crate speaks.
        ours: u8,
        /// The version that the peer speaks.
        theirs: u8,
    },
    /// The private data is longer than [`MAX_PRIVATE_DATA`](crate::MAX_PRIVATE_DATA). Nothing was sent.
    PrivateDataTooLong(usize),
    /// The stream failed, or there was no connection to the address.
    Io(io::Error),
}

impl ExchangeError {
    /// Maps an error of the stream to its meaning here.
    pub(super) fn from_stream(error: io::Error) -> Self {
        use io::ErrorKind as Kind;
        match error.kind() {
            Kind::TimedOut | Kind::WouldBlock => Self::TimedOut,
            Kind::UnexpectedEof
            | Kind::BrokenPipe
            | Kind::ConnectionReset
            | Kind::ConnectionAborted
            | Kind::WriteZero => Self::Closed,
            _ => Self::Io(error),
        }
    }
}

impl fmt::Display for ExchangeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Verbs(error) => error.fmt(f),
            Self::Peer { errno } => write!(
                f,
                "the peer could not connect its queue pair to ours: {}",
                io::Error::from_raw_os_error(*errno)
            ),
            Self::TimedOut => f.write_str("the deadline passed before both sides were ready"),
            Self::Closed => f.write_str(
                "the peer closed the connection before both sides were ready: it failed, or died",
            ),
            Self::Protocol(what) => {
                write!(f, "the peer does not exchange addresses as this crate does: {what}")
            }
            Self::Version { ours, theirs } => write!(
                f,
                "the peer speaks version {theirs} of the exchange, and this side version {ours}: both \
                 sides must use versions of the crate that agree"
            ),
            Self::PrivateDataTooLong(length) => write!(
                f,
                "the private data has {length} bytes, and must not have more than {}",
                super::MAX_PRIVATE_DATA
            ),
            Self::Io(error) => error.fmt(f),
        }
    }
}

/// As `Display`: `main` prints the `Debug` form of the error that it returns.
impl fmt::Debug for ExchangeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for ExchangeError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Verbs(error) => Some(error),
            Self::Io(error) => Some(error),
            _ => None,
        }
    }
}

impl From<Error> for ExchangeError {
    fn from(error: Error) -> Self {
        Self::Verbs(error)
    }
}

impl<T> From<StateError<T>> for ExchangeError {
    /// Drops the object.
    fn from(failed: StateError<T>) -> Self {
        Self::Verbs(failed.error)
    }
}

impl<T> From<StateError<T, Self>> for ExchangeError {
    /// Drops the object.
    fn from(failed: StateError<T, Self>) -> Self {
        failed.error
    }
}

impl From<ExchangeError> for io::Error {
    fn from(error: ExchangeError) -> Self {
        use io::ErrorKind as Kind;
        let kind = match error {
            ExchangeError::Verbs(error) => return error.into(),
            ExchangeError::Io(error) => return error,
            ExchangeError::TimedOut => Kind::TimedOut,
            ExchangeError::Closed => Kind::UnexpectedEof,
            ExchangeError::Peer { .. } => Kind::ConnectionRefused,
            ExchangeError::PrivateDataTooLong(_) => Kind::InvalidInput,
            ExchangeError::Protocol(_) | ExchangeError::Version { .. } => Kind::InvalidData,
        };
        Self::new(kind, error)
    }
}
