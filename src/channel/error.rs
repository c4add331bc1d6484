use std::fmt;

use crate::base::{Error, ErrorKind, StateError, debug, trace};
use crate::verbs::completion::{WorkError, WorkErrorClass, WorkSuccess};

/// Why an operation on a [`Channel`](crate::Channel) failed, or may have failed.
///
/// It is small, `Copy` and never allocates. Whatever the error, the device no longer uses the buffer of
/// the operation when the borrow checker lets the program use it.
#[derive(Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum TransportError {
    /// A verb failed: a post that was refused, or a completion queue that could not be polled. An
    /// error of [`ErrorKind::InvalidInput`] was found before the device saw anything.
    Verbs(Error),
    /// The operation was posted and failed. The channel is then in the error state, and
    /// all that comes after fails with [`WorkErrorClass::Flushed`] until it is
    /// [reset](crate::Channel::reset).
    Work(WorkError),
    /// As many operations are outstanding on this queue as the channel was built for. Nothing was
    /// posted.
    QueueFull,
    /// The channel has [flow control](crate::ChannelBuilder::flow_control), and the peer has posted no receive
    /// for this message yet. Nothing was posted, and the channel works.
    /// [`wait_for_credit`](crate::Channel::wait_for_credit) waits until there is a receive.
    NoCredit,
    /// The deadline has passed. The channel was stopped, and everything that was in flight has
    /// ended.
    TimedOut,
    /// A [`CancelHandle`](crate::channel::CancelHandle) has ended the wait. A wait of an operation that owns its
    /// buffer, or for [credit](crate::ChannelBuilder::flow_control), also that of a blocking operation, which was not
    /// posted, leaves everything in flight. After every other wait the channel was stopped, and everything that was in
    /// flight has ended.
    Cancelled,
    /// The completion queue held a completion that no operation of this channel is waiting for.
    UnknownCompletion {
        /// The queue pair that it named.
        queue_pair: u32,
        /// The work request that it named.
        wr_id: u64,
    },
    /// An earlier failure, time-out or unfinished scope has stopped the channel, and everything that
    /// was in flight has ended. [`reset`](crate::Channel::reset) makes it usable again.
    Stopped,
    /// The peer is gone: the stream over which the channel was connected has ended, or the [connection
    /// manager](crate::_guide::connecting#by-ip-address-through-the-connection-manager) says so. The operation may have
    /// been carried out.
    PeerGone,
    /// The [reactor](crate::Reactor) of the channel was dropped: nothing serves it any more.
    ReactorGone,
    /// The [connection manager](crate::_guide::connecting#by-ip-address-through-the-connection-manager) has not established the
    /// connection yet, so only receives can be posted. Nothing was posted, and the channel works.
    NotConnected,
    /// The channel posts no receives of its own: it takes them from
    /// [shared ones](crate::Loop::create_sharing_channel). Post there.
    ReceivesAreShared,
    /// The channel was [created by a loop](crate::Loop::create_channel), which alone posts and polls: it is to be
    /// [added](crate::Loop::add). Nothing was posted.
    OfLoop,
    /// The queue pair was destroyed, since nothing else would stop it, or the channel was
    /// [removed](crate::Loop::remove) from its loop: it cannot be used again.
    Closed,
    /// The [`PendingWork`](crate::channel::PendingWork) is not of this channel, or its result was already
    /// handed out.
    UnknownWork,
}

/// The result of an operation on a [`Channel`](crate::Channel).
pub type TransportResult<T> = Result<T, TransportError>;

impl TransportError {
    /// The kind of failure.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Verbs(error) => error.kind(),
            Self::QueueFull | Self::NoCredit => ErrorKind::QueueFull,
            Self::TimedOut => ErrorKind::TimedOut,
            Self::Cancelled => ErrorKind::Interrupted,
            Self::Work(_) if self.is_peer_gone() => ErrorKind::Unreachable,
            Self::PeerGone => ErrorKind::Unreachable,
            Self::Work(_)
            | Self::UnknownCompletion { .. }
            | Self::Stopped
            | Self::ReactorGone
            | Self::Closed => ErrorKind::Failed,
            Self::NotConnected | Self::ReceivesAreShared | Self::OfLoop | Self::UnknownWork => {
                ErrorKind::InvalidInput
            }
        }
    }

    /// The errno value, if a verb has failed.
    pub fn raw_os_error(&self) -> Option<i32> {
        match self {
            Self::Verbs(error) => error.raw_os_error(),
            _ => None,
        }
    }

    /// The failed operation, if one failed.
    pub fn work_error(&self) -> Option<WorkError> {
        match self {
            Self::Work(error) => Some(*error),
            _ => None,
        }
    }

    /// Whether the operation failed because an earlier one had failed.
    pub fn is_consequence(&self) -> bool {
        match self {
            Self::Work(error) => error.class() == WorkErrorClass::Flushed,
            Self::Stopped | Self::ReactorGone | Self::Closed => true,
            _ => false,
        }
    }

    /// Whether the peer, or the network to it, is gone or too slow: the device has sent the request as often as it may, and
    /// has heard nothing; the peer has stopped its queue pair; or it has [left](Self::PeerGone). To go on,
    /// [reset](crate::Channel::reset) the channel and connect again.
    pub fn is_peer_gone(&self) -> bool {
        match self {
            Self::Work(error) => error.class() == WorkErrorClass::Transport,
            _ => *self == Self::PeerGone,
        }
    }

    /// Whether nothing was posted and the channel works, so that the same operation may succeed later: when others have
    /// ended, when the peer has posted a receive, or when the connection is established.
    pub fn is_retryable(&self) -> bool {
        self.is_queue_full() || matches!(self, Self::NoCredit | Self::NotConnected)
    }

    /// Whether the same operation can succeed once others were completed.
    pub fn is_queue_full(&self) -> bool {
        match self {
            Self::QueueFull => true,
            Self::Verbs(error) => error.kind() == ErrorKind::QueueFull,
            _ => false,
        }
    }
}

impl fmt::Display for TransportError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Verbs(error) => error.fmt(f),
            Self::Work(error) => error.fmt(f),
            Self::QueueFull => f.write_str(
                "the queue is full: complete operations before posting more, or build the channel \
                 deeper (max_send_wr, max_recv_wr)",
            ),
            Self::NoCredit => f.write_str(
                "the peer has posted no receive for this message: wait for credit, and post it then",
            ),
            Self::TimedOut => f.write_str(
                "the deadline has passed; the channel was stopped and must be reset before it is \
                 used again",
            ),
            Self::Cancelled => f.write_str(
                "the wait was cancelled; unless it was that of an operation that owns its buffer, or for \
                 credit, also that of an operation that was not posted yet, the channel was stopped and must be \
                 reset before it is used again",
            ),
            Self::UnknownCompletion { queue_pair, wr_id } => write!(
                f,
                "a completion of queue pair {queue_pair:#x} names work request {wr_id:#x}, which is \
                 not outstanding"
            ),
            Self::Stopped => {
                f.write_str("the channel was stopped by an earlier failure and must be reset")
            }
            Self::PeerGone => f.write_str(
                "the peer is gone: its process or its host has ended, or it has dropped its channel",
            ),
            Self::ReactorGone => f.write_str(
                "the reactor of the channel was dropped: make the channel again, on one that lives",
            ),
            Self::NotConnected => f.write_str(
                "the channel is not connected yet, and until then takes receives alone; or it was taken out of its \
                 loop, and takes nothing until it is put back",
            ),
            Self::ReceivesAreShared => f.write_str(
                "the channel takes its receives from shared ones: post there",
            ),
            Self::OfLoop => f.write_str(
                "the channel was created by a loop, which alone posts: add it with Loop::add, and post there",
            ),
            Self::Closed => f.write_str(
                "the channel is not there (any more): its queue pair was destroyed, or it was removed from this \
                 loop, or was never in it",
            ),
            Self::UnknownWork => f.write_str("the work is not of this channel, or has ended"),
        }
    }
}

/// Same text as `Display`, because a `main` that returns an error prints its `Debug` form.
impl fmt::Debug for TransportError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// No source: the text says everything.
impl std::error::Error for TransportError {}

impl From<Error> for TransportError {
    #[cold]
    fn from(error: Error) -> Self {
        Self::Verbs(error)
    }
}

impl<T> From<StateError<T>> for TransportError {
    /// Drops the object.
    #[cold]
    fn from(failed: StateError<T>) -> Self {
        Self::Verbs(failed.error)
    }
}

impl From<WorkError> for TransportError {
    fn from(error: WorkError) -> Self {
        trace::work_failed(error.class() == WorkErrorClass::Flushed, error.status(), error);
        Self::Work(error)
    }
}

impl From<TransportError> for std::io::Error {
    fn from(error: TransportError) -> Self {
        use std::io::ErrorKind as Kind;
        match error {
            TransportError::Verbs(error) => error.into(),
            TransportError::TimedOut => Self::new(Kind::TimedOut, error),
            TransportError::QueueFull | TransportError::NoCredit => {
                Self::new(Kind::WouldBlock, error)
            }
            TransportError::Stopped | TransportError::ReactorGone | TransportError::Closed => {
                Self::new(Kind::NotConnected, error)
            }
            _ if error.is_peer_gone() => Self::new(Kind::ConnectionAborted, error),
            _ => Self::other(error),
        }
    }
}

/// Why a [`scope`](crate::Channel::scope) failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ScopeError<E> {
    /// The closure returned this error. Operations that were in flight were flushed, and their results
    /// are not reported.
    Closure(E),
    /// The closure succeeded, but an operation that it left unpolled failed, or could not be polled
    /// to completion when the scope ended.
    Exit(TransportError),
}

impl<E: fmt::Display> fmt::Display for ScopeError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Closure(error) => error.fmt(f),
            Self::Exit(error) => write!(f, "at the end of the scope: {error}"),
        }
    }
}

impl<E: std::error::Error + 'static> std::error::Error for ScopeError<E> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Closure(error) => error.source(),
            Self::Exit(_) => None,
        }
    }
}

impl<E: Into<Self>> From<ScopeError<E>> for std::io::Error {
    fn from(error: ScopeError<E>) -> Self {
        match error {
            ScopeError::Closure(error) => error.into(),
            ScopeError::Exit(error) => error.into(),
        }
    }
}

impl From<ScopeError<TransportError>> for TransportError {
    fn from(error: ScopeError<TransportError>) -> Self {
        match error {
            ScopeError::Closure(error) | ScopeError::Exit(error) => error,
        }
    }
}

impl<E: From<TransportError>> From<TransportError> for ScopeError<E> {
    fn from(error: TransportError) -> Self {
        Self::Closure(error.into())
    }
}

impl<E: From<Error>> From<Error> for ScopeError<E> {
    fn from(error: Error) -> Self {
        Self::Closure(error.into())
    }
}

#[cold]
pub(super) fn no_memory() -> Error {
    let reason = "no memory for the channel's table of operations";
    Error::with_reason("ibv_create_qp", libc::ENOMEM, reason)
}

/// Why an operation that owns its buffer failed, with its buffer: one of an
/// [`AsyncChannel`](crate::AsyncChannel) or a [`Loop`](crate::Loop).
pub struct OperationError<B> {
    /// The reason. That of an operation that was posted and has ended is [`Work`](TransportError::Work); or
    /// [`Stopped`](TransportError::Stopped) or [`Closed`](TransportError::Closed) if the channel was stopped, shut
    /// down or dropped, or its reactor was.
    pub error: TransportError,
    /// The buffer, if the operation has ended, or was not posted. After a failure its contents are undefined where
    /// the operation writes it. `None` if the device may still use it: only the wait has failed; or the queue pair
    /// could be neither reset nor destroyed; or a post has failed that may have been queued.
    pub buffer: Option<B>,
}

/// The result of an operation that owns its buffer: the buffer and the completion.
pub type OwnedResult<B, T = (B, WorkSuccess)> = Result<T, OperationError<B>>;

debug! { impl[B] OperationError<B>, self, error: self.error, .. }

impl<B> fmt::Display for OperationError<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl<B> std::error::Error for OperationError<B> {}

impl<B> From<TransportError> for OperationError<B> {
    /// Without a buffer.
    fn from(error: TransportError) -> Self {
        Self { error, buffer: None }
    }
}

impl<B> From<OperationError<B>> for std::io::Error {
    /// Drops the buffer.
    fn from(error: OperationError<B>) -> Self {
        error.error.into()
    }
}

impl<B> From<OperationError<B>> for TransportError {
    /// Drops the buffer.
    fn from(error: OperationError<B>) -> Self {
        error.error
    }
}

/// A request that was not posted, and why.
#[expect(missing_debug_implementations, reason = "no program can name it")]
pub struct Refused<R> {
    pub(crate) error: TransportError,
    /// `None` if the device may have it.
    pub(crate) request: Option<R>,
}

impl<R> Refused<R> {
    pub(crate) fn new(error: TransportError, request: Option<R>) -> Self {
        Self { error, request }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_is_small() {
        assert!(size_of::<TransportResult<()>>() <= 72);
        assert!(size_of::<TransportResult<crate::verbs::completion::WorkSuccess>>() <= 72);
    }

    #[test]
    fn kinds_of_io_errors_are_those_of_the_standard_library() {
        use std::io::ErrorKind as Kind;
        for (error, kind) in [
            (TransportError::TimedOut, Kind::TimedOut),
            (TransportError::QueueFull, Kind::WouldBlock),
            (TransportError::NoCredit, Kind::WouldBlock),
            (TransportError::Stopped, Kind::NotConnected),
            (TransportError::Closed, Kind::NotConnected),
        ] {
            let io = std::io::Error::from(error);
            assert_eq!((io.kind(), io.to_string()), (kind, error.to_string()));
        }
    }

    #[test]
    fn scope_errors_tell_where_they_come_from() {
        let inside = ScopeError::<TransportError>::from(TransportError::TimedOut);
        assert_eq!(inside, ScopeError::Closure(TransportError::TimedOut));
        let at_exit = ScopeError::<TransportError>::Exit(TransportError::QueueFull);
        assert!(at_exit.to_string().starts_with("at the end of the scope: the queue is full"));
        assert_eq!(TransportError::from(at_exit), TransportError::QueueFull);
    }
}
