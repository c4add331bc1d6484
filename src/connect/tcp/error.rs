use std::ffi::{CStr, c_char};
use std::net::SocketAddr;
use std::{fmt, io};

use crate::base::{Error, ErrorKind, StateError};

/// The most private data that [`PreparedChannel::connect`](crate::PreparedChannel::connect) and similar methods
/// exchange: 8 KiB.
pub const MAX_PRIVATE_DATA: usize = 8192;

/// Why `connect` or `accept` over a stream failed. The peer is told if it can be.
#[non_exhaustive]
pub enum ExchangeError {
    /// A verb failed on our side, or its input was wrong.
    Verbs(Error),
    /// The peer could not connect its queue pair: a verb failed there with this errno value.
    Peer {
        /// The errno value on the peer's machine.
        errno: i32,
    },
    /// No connection to the address.
    NoConnection {
        /// The last address that was tried, if a host name has several.
        address: SocketAddr,
        /// The reason.
        error: io::Error,
    },
    /// The deadline passed at this stage.
    TimedOut(ExchangeStage),
    /// The peer closed the stream, or died, at this stage.
    Closed(ExchangeStage),
    /// The peer sent something else: it is another program, or a faulty one.
    Protocol(&'static str),
    /// The peer's version of this crate has another version of the exchange.
    Version {
        /// Our version.
        ours: u8,
        /// The peer's version.
        theirs: u8,
    },
    /// The private data is longer than [`MAX_PRIVATE_DATA`](crate::tcp::MAX_PRIVATE_DATA). Nothing was sent.
    PrivateDataTooLong(usize),
    /// The stream or the listener failed, or the host name has no address.
    Io(io::Error),
}

/// The stage of a `connect` or `accept` over a stream.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum ExchangeStage {
    /// The exchange waited for the stream.
    Stream,
    /// The sides exchanged the addresses of both queue pairs.
    Addresses,
    /// Its queue pair was ready, and it waited for the peer's.
    Peer,
}

impl fmt::Display for ExchangeStage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Stream => "while waiting for a connection",
            Self::Addresses => "before it had sent its queue pair's address",
            Self::Peer => "before it had said that its queue pair is ready",
        })
    }
}

impl ExchangeError {
    pub(super) fn from_stream(error: io::Error) -> Self {
        use io::ErrorKind as Kind;
        match error.kind() {
            Kind::TimedOut | Kind::WouldBlock => Self::TimedOut(ExchangeStage::Addresses),
            Kind::UnexpectedEof
            | Kind::BrokenPipe
            | Kind::ConnectionReset
            | Kind::ConnectionAborted
            | Kind::WriteZero => Self::Closed(ExchangeStage::Addresses),
            _ => Self::Io(error),
        }
    }

    /// The peer's failure: the last stage.
    pub(super) fn of_peer(self) -> Self {
        match self {
            Self::TimedOut(_) => Self::TimedOut(ExchangeStage::Peer),
            Self::Closed(_) => Self::Closed(ExchangeStage::Peer),
            other => other,
        }
    }

    /// The kind of failure.
    pub fn kind(&self) -> ErrorKind {
        let of = |error: &io::Error| match (error.raw_os_error(), error.kind()) {
            (_, io::ErrorKind::TimedOut) => ErrorKind::TimedOut,
            (_, io::ErrorKind::ConnectionRefused) => ErrorKind::Unreachable,
            (Some(errno), _) => Error::new("connect", errno).kind(),
            (None, _) => ErrorKind::Failed,
        };
        match self {
            Self::Verbs(error) => error.kind(),
            Self::NoConnection { error, .. } | Self::Io(error) => of(error),
            Self::TimedOut(_) => ErrorKind::TimedOut,
            Self::Closed(_) => ErrorKind::Unreachable,
            Self::PrivateDataTooLong(_) => ErrorKind::InvalidInput,
            Self::Peer { .. } | Self::Protocol(_) | Self::Version { .. } => ErrorKind::Failed,
        }
    }

    /// Whether the peer closed the stream, or died.
    pub fn is_peer_gone(&self) -> bool {
        matches!(self, Self::Closed(_))
    }

    /// Whether another attempt may succeed without a change on this side: the peer is not there yet, does not answer,
    /// has gone, or could not connect. Wait a little before it.
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::NoConnection { .. } | Self::TimedOut(_) | Self::Closed(_) | Self::Peer { .. } => {
                true
            }
            Self::Verbs(error) => {
                matches!(
                    error.kind(),
                    ErrorKind::Unreachable | ErrorKind::TimedOut | ErrorKind::Resource
                )
            }
            Self::Io(error) => matches!(
                error.kind(),
                io::ErrorKind::Interrupted
                    | io::ErrorKind::ConnectionRefused
                    | io::ErrorKind::ConnectionReset
            ),
            Self::Protocol(_) | Self::Version { .. } | Self::PrivateDataTooLong(_) => false,
        }
    }

    /// The errno value of this side, if there is one.
    pub fn raw_os_error(&self) -> Option<i32> {
        match self {
            Self::Verbs(error) => error.raw_os_error(),
            Self::NoConnection { error, .. } | Self::Io(error) => error.raw_os_error(),
            _ => None,
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
            Self::NoConnection { address, error } => {
                write!(f, "no TCP connection to {}: {error}", Named(*address))
            }
            Self::TimedOut(ExchangeStage::Stream) => {
                f.write_str("the deadline passed while waiting for a connection")
            }
            Self::TimedOut(stage) => {
                write!(f, "the peer does not answer: the deadline passed {stage}")
            }
            Self::Closed(stage) => {
                write!(f, "the peer failed, or died: it closed the connection {stage}")
            }
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
                "the private data has {length} bytes, and must not have more than {MAX_PRIVATE_DATA}"
            ),
            Self::Io(error) => error.fmt(f),
        }
    }
}

/// With the interface's name, which `SocketAddr` writes as a number.
struct Named(SocketAddr);

impl fmt::Display for Named {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let SocketAddr::V6(v6) = self.0
            && v6.scope_id() != 0
        {
            let mut name: [c_char; libc::IF_NAMESIZE] = [0; libc::IF_NAMESIZE];
            // SAFETY: C writes a string of at most this size.
            let found = unsafe { libc::if_indextoname(v6.scope_id(), name.as_mut_ptr()) };
            if !found.is_null() {
                // SAFETY: C has written a string, and `name` is live.
                let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy();
                return write!(f, "[{}%{name}]:{}", v6.ip(), v6.port());
            }
        }
        self.0.fmt(f)
    }
}

/// Writes the text of `Display`: `main` prints the `Debug` form of its error.
impl fmt::Debug for ExchangeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Without a source: the text says everything.
impl std::error::Error for ExchangeError {}

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
            ExchangeError::NoConnection { ref error, .. } => error.kind(),
            ExchangeError::TimedOut(_) => Kind::TimedOut,
            ExchangeError::Closed(_) => Kind::UnexpectedEof,
            ExchangeError::Peer { .. } => Kind::ConnectionRefused,
            ExchangeError::PrivateDataTooLong(_) => Kind::InvalidInput,
            ExchangeError::Protocol(_) | ExchangeError::Version { .. } => Kind::InvalidData,
        };
        Self::new(kind, error)
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddrV6;

    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "asks the kernel")]
    fn an_interface_has_its_name() {
        let address = |scope| SocketAddrV6::new("fe80::7".parse().unwrap(), 1, 0, scope).into();
        // The loopback interface is the first of each network namespace.
        assert_eq!(Named(address(1)).to_string(), "[fe80::7%lo]:1");
        assert_eq!(Named(address(u32::MAX)).to_string(), "[fe80::7%4294967295]:1");
        assert_eq!(Named(address(0)).to_string(), "[fe80::7]:1");
    }
}
