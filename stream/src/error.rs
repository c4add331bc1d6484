//! Why a stream has failed.

use std::{error, fmt, io};

use ibverbs::{Error, TransportError, completion::WorkErrorClass};

/// Why a stream has failed. It is what is in the [`io::Error`]s of a stream, and remains: see
/// [`Stream::take_error`](crate::Stream::take_error).
///
/// | | [`io::ErrorKind`] |
/// |---|---|
/// | [`Reset`](Self::Reset) | `ConnectionReset` |
/// | [`BrokenPipe`](Self::BrokenPipe) | `BrokenPipe` |
/// | [`TimedOut`](Self::TimedOut) | `TimedOut` |
/// | [`Protocol`](Self::Protocol) | `InvalidData` |
/// | [`Aborted`](Self::Aborted) | `ConnectionAborted` |
/// | [`Refused`](Self::Refused) | `ConnectionRefused` |
/// | [`Transport`](Self::Transport) | `TimedOut` if the peer does not answer, `NotConnected` if the device is gone, else `ConnectionReset` |
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum StreamError {
    /// The peer has dropped its stream before it had read everything, or has died.
    Reset,
    /// The peer reads no more, or this side has been shut down for writing.
    BrokenPipe,
    /// A message has not arrived for longer than two periods of [keep-alive](crate::HubBuilder::keep_alive).
    TimedOut,
    /// The peer does not keep the rules: what is wrong.
    Protocol(&'static str),
    /// The hub was stopped.
    Aborted,
    /// The peer's listener has refused this side, which was connecting: the reason.
    Refused(Refusal),
    /// RDMA has failed.
    Transport(TransportError),
}

impl StreamError {
    /// The kind of the [`io::Error`].
    pub fn kind(&self) -> io::ErrorKind {
        use io::ErrorKind as Kind;
        match self {
            Self::Reset => Kind::ConnectionReset,
            Self::BrokenPipe => Kind::BrokenPipe,
            Self::TimedOut => Kind::TimedOut,
            Self::Protocol(_) => Kind::InvalidData,
            Self::Aborted => Kind::ConnectionAborted,
            Self::Refused(_) => Kind::ConnectionRefused,
            Self::Transport(TransportError::Work(error))
                if error.class() == WorkErrorClass::Transport =>
            {
                Kind::TimedOut
            }
            Self::Transport(TransportError::Verbs(error)) if is_gone(error) => Kind::NotConnected,
            Self::Transport(TransportError::Closed | TransportError::Stopped) => {
                Kind::ConnectionAborted
            }
            Self::Transport(_) => Kind::ConnectionReset,
        }
    }
}

/// Why a listener has refused a client.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Refusal {
    /// Its hub has [`max_connections`](crate::HubBuilder::max_connections) streams.
    Full,
    /// Its device has no queue pair for another stream, or its process no memory.
    NoResources,
    /// The client was not connected in time: within half a second while others waited, or within ten.
    TooSlow,
    /// The address leads to another device of the peer than its hub's.
    OtherDevice,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Full => "its hub is full: it has max_connections streams",
            Self::NoResources => "its device or memory has no room for another stream",
            Self::TooSlow => "this side was not connected in time, while others waited",
            Self::OtherDevice => {
                "the address leads to another device of the peer than its hub's: connect to an address of that one"
            }
        })
    }
}

/// Whether the device is gone.
pub(crate) fn is_gone(error: &Error) -> bool {
    // EIO, ENODEV
    matches!(error.raw_os_error(), Some(5 | 19))
}

impl fmt::Display for StreamError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Reset => f.write_str("the peer has dropped the stream, or died"),
            Self::BrokenPipe => f.write_str("the peer reads no more, or the stream was shut down"),
            Self::TimedOut => f.write_str("the peer takes nothing any more"),
            Self::Protocol(what) => write!(f, "the peer does not speak as a stream does: {what}"),
            Self::Aborted => f.write_str("the hub of the stream was stopped"),
            Self::Refused(reason) => write!(f, "the peer has refused the stream: {reason}"),
            Self::Transport(error) => error.fmt(f),
        }
    }
}

impl error::Error for StreamError {
    fn source(&self) -> Option<&(dyn error::Error + 'static)> {
        match self {
            Self::Transport(error) => Some(error),
            _ => None,
        }
    }
}

impl From<StreamError> for io::Error {
    fn from(error: StreamError) -> Self {
        Self::new(error.kind(), error)
    }
}
