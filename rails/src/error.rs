//! Errors.

use std::sync::Arc;
use std::{error, fmt, io};

use ibverbs::TransportError;

/// Why something that was asked of [`Rails`](crate::Rails) failed.
#[derive(Debug)]
#[non_exhaustive]
pub enum RailsError {
    /// A verb failed, on the device of this name.
    Verbs {
        /// The device.
        device: String,
        /// The error.
        error: ibverbs::Error,
    },
    /// The control stream failed: the peer is gone, or cannot be reached.
    Control(io::Error),
    /// No device of this side can reach one of the other side.
    NoPair {
        /// Each device of this side, with its addresses.
        ours: Vec<String>,
        /// The devices of the other side.
        theirs: Vec<String>,
    },
    /// The peer refused the connection, with these words.
    Refused(String),
    /// All pairs of devices have failed: each with the reason.
    AllRailsDown(Arc<[(String, String)]>),
    /// The transfer itself is at fault, so another rail would not carry it either: the peer does not allow the access,
    /// or has freed the memory.
    Transfer {
        /// The pair of devices that found it.
        pair: String,
        /// The error.
        error: TransportError,
    },
    /// The peer is unknown, or gone.
    UnknownPeer,
    /// The deadline has passed. A transfer goes on.
    TimedOut,
    /// The input is not possible; the text names the limit.
    InvalidInput(String),
}

/// Why each pair of devices has failed. Everything that ends by it has the same list.
pub(crate) type Reasons = Arc<[(String, String)]>;

/// The result of what [`Rails`](crate::Rails) does.
pub type Result<T, E = RailsError> = std::result::Result<T, E>;

impl RailsError {
    pub(crate) fn verbs(device: &str, error: ibverbs::Error) -> Self {
        Self::Verbs { device: device.into(), error }
    }

    /// The error for a range of memory that does not fit.
    pub(crate) fn range(error: ibverbs::Error) -> Self {
        Self::InvalidInput(error.to_string())
    }
}

impl fmt::Display for RailsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Verbs { device, error } => write!(f, "{device}: {error}"),
            Self::Control(error) => write!(f, "the control stream: {error}"),
            Self::NoPair { ours, theirs } => {
                let (ours, theirs) = (ours.join(", "), theirs.join(", "));
                write!(f, "no device of ours ({ours}) can reach one of the peer's ({theirs})")
            }
            Self::Refused(reason) => write!(f, "the peer refused the connection: {reason}"),
            Self::AllRailsDown(reasons) => {
                f.write_str("all rails are down")?;
                reasons.iter().try_for_each(|(pair, reason)| write!(f, "; {pair}: {reason}"))
            }
            Self::Transfer { pair, error } => write!(f, "{pair}: {error}"),
            Self::UnknownPeer => f.write_str("there is no such peer (any more)"),
            Self::TimedOut => f.write_str("the deadline has passed"),
            Self::InvalidInput(reason) => f.write_str(reason),
        }
    }
}

impl error::Error for RailsError {
    fn source(&self) -> Option<&(dyn error::Error + 'static)> {
        match self {
            Self::Verbs { error, .. } => Some(error),
            Self::Control(error) => Some(error),
            Self::Transfer { error, .. } => Some(error),
            _ => None,
        }
    }
}

impl From<io::Error> for RailsError {
    fn from(error: io::Error) -> Self {
        Self::Control(error)
    }
}
