//! Errors of connecting.

use std::{fmt, io};

use super::diagnose;
use super::event::{ConnectionEvent, ConnectionEventKind, Copied};
use super::private_data::PrivateData;
use crate::base::{Error, ErrorKind, StateError};

/// Why a connection was not established.
///
/// The call has released what it created, and told the peer if possible.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum ConnectionError {
    /// A verb or a function of librdmacm failed, or its arguments were wrong.
    Verbs(Error),
    /// The caller's deadline has passed.
    TimedOut,
    /// No RDMA device reaches the address, or its hardware address was not found. The errno value tells more:
    /// `ENODEV`, `ETIMEDOUT` ..
    NoAddress(i32),
    /// The network has no path to the address. The errno value tells more.
    NoRoute(i32),
    /// The peer does not answer. The number is `ETIMEDOUT`, or the status of a peer that takes no datagrams.
    Unreachable(i32),
    /// The peer rejected the connection.
    Rejected(Rejection),
    /// The connection failed after the peer's answer. The errno value tells more.
    Failed(i32),
    /// The peer went away during the handshake.
    Disconnected,
    /// The queue pair is on another device than the address or the request. Nothing has changed.
    WrongDevice,
    /// The queue pair is on another port than the address or the request. Nothing has changed.
    WrongPort {
        /// The queue pair's port.
        queue_pair: u8,
        /// The port that reaches the peer.
        route: u8,
    },
    /// The device is going away.
    DeviceRemoved,
    /// An event that is not expected here.
    Unexpected(ConnectionEventKind),
}

impl Copied {
    /// For a caller that waits for a connection.
    pub(super) fn error(&self) -> ConnectionError {
        use ConnectionEventKind as Kind;

        let ConnectionEvent { kind, status, private_data, .. } = self.public;
        match kind {
            // To the connection manager, a device that this process cannot use does not exist.
            Kind::AddressError if diagnose::may_be_unusable(-status) => {
                diagnose::unopened(Error::new("rdma_resolve_addr", -status))
                    .map_or(ConnectionError::NoAddress(status), ConnectionError::Verbs)
            }
            Kind::AddressError | Kind::NameError => ConnectionError::NoAddress(status),
            Kind::RouteError => ConnectionError::NoRoute(status),
            Kind::Unreachable => ConnectionError::Unreachable(status),
            Kind::Rejected => ConnectionError::Rejected(Rejection { status, private_data }),
            Kind::ConnectError | Kind::MulticastError => ConnectionError::Failed(status),
            Kind::Disconnected => ConnectionError::Disconnected,
            Kind::DeviceRemoved => ConnectionError::DeviceRemoved,
            other => ConnectionError::Unexpected(other),
        }
    }
}

/// A peer's rejection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rejection {
    pub(super) status: i32,
    pub(super) private_data: PrivateData,
}

impl Rejection {
    /// The reason, if known.
    pub fn reason(&self) -> RejectReason {
        match self.status {
            8 => RejectReason::NoListener,
            10 => RejectReason::StaleConnection,
            28 => RejectReason::Refused,
            status if status == -libc::ECONNREFUSED => RejectReason::Refused,
            _ => RejectReason::Other,
        }
    }

    /// The InfiniBand reason code, or on iWARP a negative errno value.
    pub fn status(&self) -> i32 {
        self.status
    }

    /// The private data.
    pub fn private_data(&self) -> &PrivateData {
        &self.private_data
    }
}

/// Why a peer rejected a connection.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum RejectReason {
    /// The program refused or went away. On iWARP also: its backlog was full, or no program listens.
    Refused,
    /// No program listens at that address.
    NoListener,
    /// The queue pair's number belonged to another connection a moment ago: try later, or use another queue
    /// pair.
    StaleConnection,
    /// Another reason: see [`Rejection::status`].
    Other,
}

impl ConnectionError {
    /// iWARP's TCP connection was not accepted.
    pub(super) fn refused() -> Self {
        let status = -libc::ECONNREFUSED;
        Self::Rejected(Rejection { status, private_data: PrivateData::EMPTY })
    }

    /// The kind of failure.
    pub fn kind(&self) -> ErrorKind {
        let of = |errno: i32| Error::new("rdma_connect", errno.saturating_abs()).kind();
        match *self {
            Self::Verbs(error) => error.kind(),
            Self::TimedOut => ErrorKind::TimedOut,
            Self::NoAddress(errno) | Self::NoRoute(errno) if errno != 0 => of(errno),
            Self::Failed(errno) if errno != 0 => of(errno),
            Self::NoAddress(_) | Self::NoRoute(_) | Self::Unreachable(_) => ErrorKind::Unreachable,
            Self::Rejected(_) | Self::Disconnected => ErrorKind::Unreachable,
            Self::WrongDevice | Self::WrongPort { .. } => ErrorKind::InvalidInput,
            Self::Failed(_) | Self::DeviceRemoved | Self::Unexpected(_) => ErrorKind::Driver,
        }
    }

    /// The errno value, if there is one.
    pub fn raw_os_error(&self) -> Option<i32> {
        match *self {
            Self::Verbs(error) => error.raw_os_error(),
            Self::NoAddress(errno) | Self::NoRoute(errno) | Self::Failed(errno) => {
                Some(errno.saturating_abs()).filter(|&errno| errno != 0)
            }
            Self::Unreachable(errno) if errno < 0 => Some(errno.saturating_abs()),
            _ => None,
        }
    }
}

impl fmt::Display for ConnectionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let system = |errno: &i32| io::Error::from_raw_os_error(errno.saturating_abs());
        match self {
            Self::Verbs(error) => error.fmt(f),
            Self::TimedOut => f.write_str("the time limit for connecting has passed"),
            Self::NoAddress(errno) => {
                f.write_str("no RDMA device reaches the address")?;
                if errno.saturating_abs() != libc::ENODEV {
                    write!(f, ": {}", system(errno))?;
                }
                f.write_str(&diagnose::their_addresses())
            }
            Self::NoRoute(errno) => write!(f, "there is no path to the address: {}", system(errno)),
            Self::Unreachable(errno) if *errno > 0 => {
                write!(f, "the peer does not take datagrams: status {errno}")
            }
            Self::Unreachable(errno) => write!(f, "the peer does not answer: {}", system(errno)),
            Self::Rejected(rejection) => {
                f.write_str("the peer has rejected the connection: ")?;
                match rejection.reason() {
                    RejectReason::Refused => f.write_str("its program refuses"),
                    RejectReason::NoListener => f.write_str("no program listens there"),
                    RejectReason::StaleConnection => {
                        f.write_str("the queue pair's number was that of another connection")
                    }
                    RejectReason::Other => {
                        write!(f, "{} (reason {})", in_words(rejection.status), rejection.status)
                    }
                }
            }
            Self::Failed(errno) => {
                write!(f, "the connection could not be established: {}", system(errno))
            }
            Self::Disconnected => f.write_str("the peer has gone away before it was connected"),
            Self::WrongDevice => f.write_str(
                "the queue pair is on another device than the one that reaches the peer",
            ),
            Self::WrongPort { queue_pair, route } => write!(
                f,
                "the queue pair is on port {queue_pair}, and the peer is reached through port {route}"
            ),
            Self::DeviceRemoved => f.write_str("the device is going away"),
            Self::Unexpected(kind) => write!(f, "the connection manager tells of {kind:?}"),
        }
    }
}

/// InfiniBand specification, volume 1, section 12.6.7.2.
fn in_words(reason: i32) -> &'static str {
    match reason {
        1 => "it has no queue pair left",
        2 => "it has no end-to-end context left",
        3 => "it has no resources left",
        4 => "it has given up waiting",
        5 => "it does not support the request",
        6 => "it does not know the communication ID",
        7 => "it does not know the communication instance",
        9 => "it takes no transport service of this type",
        11 => "the RD channel does not exist",
        12 => "the primary path's remote GID is not its own",
        13 => "the primary path's remote LID is not its own",
        14 => "the primary path's service level is not valid",
        15 => "the primary path's traffic class is not valid",
        16 => "the primary path's hop limit is not valid",
        17 => "the primary path's packet rate is not valid",
        18 => "the alternate path's remote GID is not its own",
        19 => "the alternate path's remote LID is not its own",
        20 => "the alternate path's service level is not valid",
        21 => "the alternate path's traffic class is not valid",
        22 => "the alternate path's hop limit is not valid",
        23 => "the alternate path's packet rate is not valid",
        24 => "it redirects to another port and connection manager",
        25 => "it redirects to another port",
        26 => "it does not take the path MTU",
        27 => "it cannot answer so many reads and atomics at a time",
        29 => "it does not take the number of RNR retries",
        30 => "the communication ID is in use",
        31 => "it does not speak this version of the protocol",
        32 => "the primary path's flow label is not valid",
        33 => "the alternate path's flow label is not valid",
        35 => "it does not take the vendor's option",
        _ => "for a reason of its own",
    }
}

/// The text says everything, so there is no source.
impl std::error::Error for ConnectionError {}

impl<T> From<StateError<T>> for ConnectionError {
    /// Drops the object.
    fn from(failed: StateError<T>) -> Self {
        failed.error.into()
    }
}

impl From<Error> for ConnectionError {
    /// An expired wait becomes [`TimedOut`](Self::TimedOut).
    fn from(error: Error) -> Self {
        if error.verb() == super::WAIT && error.raw_os_error() == Some(libc::ETIMEDOUT) {
            return Self::TimedOut;
        }
        Self::Verbs(error)
    }
}

impl From<ConnectionError> for io::Error {
    fn from(error: ConnectionError) -> Self {
        let kind = match error {
            ConnectionError::Verbs(error) => return error.into(),
            ConnectionError::Rejected(_) => io::ErrorKind::ConnectionRefused,
            ConnectionError::TimedOut => io::ErrorKind::TimedOut,
            ConnectionError::Disconnected => io::ErrorKind::ConnectionReset,
            ConnectionError::NoAddress(_)
            | ConnectionError::NoRoute(_)
            | ConnectionError::Unreachable(_) => io::ErrorKind::HostUnreachable,
            ConnectionError::WrongDevice | ConnectionError::WrongPort { .. } => {
                io::ErrorKind::InvalidInput
            }
            _ => io::ErrorKind::Other,
        };
        Self::new(kind, error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rejected(status: i32) -> ConnectionError {
        ConnectionError::Rejected(Rejection { status, private_data: PrivateData::EMPTY })
    }

    #[test]
    fn each_error_says_what_it_is() {
        for (error, part, kind) in [
            (ConnectionError::TimedOut, "time", ErrorKind::TimedOut),
            (ConnectionError::NoAddress(-libc::ENODEV), "reaches the address", ErrorKind::NotFound),
            (ConnectionError::NoRoute(-libc::ENETUNREACH), "no path", ErrorKind::Unreachable),
            (
                ConnectionError::Unreachable(-libc::ETIMEDOUT),
                "does not answer",
                ErrorKind::Unreachable,
            ),
            (ConnectionError::Unreachable(1), "status 1", ErrorKind::Unreachable),
            (ConnectionError::Failed(i32::MIN), "established", ErrorKind::Driver),
            (rejected(28), "refuses", ErrorKind::Unreachable),
            (rejected(8), "listens", ErrorKind::Unreachable),
            (rejected(10), "another connection", ErrorKind::Unreachable),
            (rejected(-libc::ECONNREFUSED), "refuses", ErrorKind::Unreachable),
            (rejected(4), "it has given up waiting (reason 4)", ErrorKind::Unreachable),
            (rejected(77), "reason 77", ErrorKind::Unreachable),
            (
                ConnectionError::WrongPort { queue_pair: 2, route: 1 },
                "port 2",
                ErrorKind::InvalidInput,
            ),
        ] {
            assert!(error.to_string().contains(part), "{error}");
            assert_eq!(error.kind(), kind, "{error}");
        }
        assert_eq!(io::Error::from(rejected(28)).kind(), io::ErrorKind::ConnectionRefused);
    }

    /// For an unreachable peer, a positive number is a status of InfiniBand.
    #[test]
    fn only_numbers_of_the_system_are_errno_values() {
        let errno = |error: ConnectionError| error.raw_os_error();
        for error in [ConnectionError::NoAddress, ConnectionError::NoRoute, ConnectionError::Failed]
        {
            assert_eq!([error(-5), error(5), error(0)].map(errno), [Some(5), Some(5), None]);
        }
        let unreachable = [-5, 0, 5].map(ConnectionError::Unreachable);
        assert_eq!(unreachable.map(errno), [Some(5), None, None]);
        assert_eq!(errno(rejected(-5)), None);
    }

    #[test]
    fn only_the_end_of_a_wait_is_a_timeout() {
        let wait = crate::verbs::device::event_file::timed_out(super::super::WAIT);
        assert_eq!(wait.to_string(), "rdma_get_cm_event: the deadline has passed");
        assert_eq!(ConnectionError::from(wait), ConnectionError::TimedOut);
        let verb = Error::new("ibv_modify_qp", libc::ETIMEDOUT);
        assert_eq!(ConnectionError::from(verb), ConnectionError::Verbs(verb));
    }
}
