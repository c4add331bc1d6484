use std::collections::BTreeSet;
use std::net::Ipv6Addr;
use std::sync::{Mutex, PoisonError};
use std::{fmt, hint, io};

use crate::base::{
    GidClass, Problem, QueuePairState, QueuePairType, debug, device_access::Unusable, ffi, linux,
};

/// A verb that failed, or was not called because its input was wrong.
///
/// It is small and `Copy`. Programs use [`kind`](Self::kind), or [`raw_os_error`](Self::raw_os_error)
/// with the verb's man page. `Display` is for people: it names the verb, the error and, if known, a remedy.
///
/// A posted work request that fails is a [`WorkError`](crate::completion::WorkError) instead.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Error {
    verb: &'static str,
    errno: i32,
    detail: Detail,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Detail {
    None,
    Reason(&'static str),
    Range {
        what: &'static str,
        value: u64,
        low: u32,
        high: u64,
    },
    /// In C's types, which are smaller.
    Transition {
        problem: Problem,
        kind: ffi::ibv_qp_type,
        from: ffi::ibv_qp_state,
        to: ffi::ibv_qp_state,
    },
    Gids {
        ours: (GidClass, Ipv6Addr),
        theirs: (GidClass, Ipv6Addr),
    },
    /// Types of queue pairs that cannot be connected to each other.
    Types {
        ours: QueuePairType,
        theirs: QueuePairType,
    },
    /// Two partitions, or two limited members.
    Partitions {
        ours: u16,
        theirs: u16,
    },
    /// The queue pair's state, and the first state that allows the post.
    State {
        state: QueuePairState,
        needed: QueuePairState,
    },
    Holds {
        more_than: u32,
        what: &'static str,
    },
    GidIndex {
        index: u32,
        port: u8,
    },
    Path {
        ours: Ipv6Addr,
        index: u8,
        theirs: Ipv6Addr,
    },
}

/// The kind of an [`Error`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum ErrorKind {
    /// An argument is wrong: out of range, of the wrong object, or not allowed in this state (`EINVAL`, `EFAULT`,
    /// `ERANGE`, `EMSGSIZE`).
    InvalidInput,
    /// Memory, locked memory, file descriptors or queue pairs have run out (`ENOMEM`, `EMFILE`, `ENFILE`, `ENOSPC`,
    /// `EAGAIN`).
    Resource,
    /// The process may not do this (`EPERM`, `EACCES`).
    Permission,
    /// The device, port or entry does not exist (`ENOENT`, `ENODEV`, `ENXIO`, `ENODATA`).
    NotFound,
    /// The device, its provider or the kernel does not support this (`EOPNOTSUPP`, `ENOSYS`,
    /// `EPROTONOSUPPORT`).
    Unsupported,
    /// The queue has no room for another request (`ENOMEM` of a post, `ENOMEM` or `ENOSPC` of a batch).
    QueueFull,
    /// The object is still in use (`EBUSY`).
    Busy,
    /// The port is down, or there is no route to the peer (`ENETDOWN`, `ENETUNREACH`, `EHOSTUNREACH`, `EADDRNOTAVAIL`).
    Unreachable,
    /// The caller's timeout or deadline has passed (`ETIMEDOUT`).
    TimedOut,
    /// A signal arrived (`EINTR`).
    Interrupted,
    /// A request has failed, or an earlier failure has ended it: see [`WorkError`](crate::completion::WorkError).
    Failed,
    /// The device is gone or broken (`EIO`, and every value not listed here).
    Driver,
}

impl Error {
    /// The failure of `verb` with `errno`, for verbs that a program calls itself by [`ffi`](crate::ffi). 0 becomes
    /// `EIO`: some C libraries fail without an errno.
    #[inline]
    pub const fn new(verb: &'static str, errno: i32) -> Self {
        let errno = if errno == 0 { libc::EIO } else { errno };
        Self { verb, errno, detail: Detail::None }
    }

    /// Found before the verb was called.
    #[inline]
    pub(crate) const fn invalid(verb: &'static str, reason: &'static str) -> Self {
        Self::with_reason(verb, libc::EINVAL, reason)
    }

    #[inline]
    pub(crate) const fn with_reason(verb: &'static str, errno: i32, reason: &'static str) -> Self {
        Self { verb, errno, detail: Detail::Reason(reason) }
    }

    #[cold]
    pub(crate) const fn with(verb: &'static str, errno: i32, detail: Detail) -> Self {
        Self { verb, errno, detail }
    }

    /// `EINVAL`: not within `low..=high`.
    #[inline]
    pub(crate) const fn out_of_range(
        verb: &'static str,
        what: &'static str,
        value: u64,
        low: u32,
        high: u64,
    ) -> Self {
        Self { verb, errno: libc::EINVAL, detail: Detail::Range { what, value, low, high } }
    }

    /// `EINVAL`: more than `most`. It has few arguments, for the data path: the verb and what it is about come together.
    #[cold]
    #[inline(never)]
    pub(crate) const fn beyond(about: &'static [&'static str; 2], value: u64, most: u64) -> Self {
        Self::out_of_range(about[0], about[1], value, 0, most)
    }

    #[inline]
    pub(crate) fn invalid_if(is_so: bool, verb: &'static str, reason: &'static str) -> Result<()> {
        if is_so { Err(Self::invalid(verb, reason)) } else { Ok(()) }
    }

    #[inline]
    pub(crate) fn unsupported_if(
        is_so: bool,
        verb: &'static str,
        reason: &'static str,
    ) -> Result<()> {
        if is_so { Err(Self::with_reason(verb, libc::EOPNOTSUPP, reason)) } else { Ok(()) }
    }

    #[cold]
    pub(crate) fn excess(&self, about: &str) -> Option<u64> {
        match self.detail {
            Detail::Range { what, value, .. } if what == about => Some(value),
            _ => None,
        }
    }

    pub(crate) fn within(
        verb: &'static str,
        what: &'static str,
        value: impl Into<u64>,
        low: u32,
        high: impl Into<u64>,
    ) -> Result<()> {
        let (value, high) = (value.into(), high.into());
        if (low.into()..=high).contains(&value) {
            return Ok(());
        }
        Err(Self::out_of_range(verb, what, value, low, high))
    }

    /// Adds the device that this process cannot use, if any. The errno has other causes too.
    #[cold]
    pub(crate) fn or_unusable(self, device: Option<Unusable>) -> Self {
        let Some(device) = device else { return self };
        let errno = if device.is_denied() { libc::EACCES } else { self.errno };
        Self::with_text(self.verb, errno, device.to_string(), "the process cannot use the device")
    }

    /// The text is made when the error happens, and stays in memory, since an error is `Copy`: one for each
    /// different mistake of the process. Beyond `MOST`, `otherwise` takes their place.
    #[cold]
    pub(crate) fn with_text(
        verb: &'static str,
        errno: i32,
        text: String,
        otherwise: &'static str,
    ) -> Self {
        const MOST: usize = 64;
        static TEXTS: Mutex<BTreeSet<&'static str>> = Mutex::new(BTreeSet::new());

        let mut texts = TEXTS.lock().unwrap_or_else(PoisonError::into_inner);
        let reason = match texts.get(text.as_str()) {
            Some(text) => text,
            None if texts.len() < MOST => {
                let text: &'static str = text.leak();
                texts.insert(text);
                text
            }
            None => otherwise,
        };
        Self::with_reason(verb, errno, reason)
    }

    /// The C verb, such as `"ibv_reg_mr"`, that failed, or that was not called.
    pub const fn verb(&self) -> &'static str {
        self.verb
    }

    /// The errno value, positive. It is always `Some`, and usually `EINVAL` if the verb was not called.
    pub const fn raw_os_error(&self) -> Option<i32> {
        Some(self.errno)
    }

    pub(crate) const fn errno(&self) -> i32 {
        self.errno
    }

    /// The kind of failure.
    pub fn kind(&self) -> ErrorKind {
        match self.errno {
            // Even if the queue is full too: polling would not help.
            _ if matches!(self.detail, Detail::State { .. }) => ErrorKind::InvalidInput,
            libc::ENOMEM if self.verb.starts_with("ibv_post_") || self.verb == "ibv_bind_mw" => {
                ErrorKind::QueueFull
            }
            // rxe returns these.
            libc::ENOMEM | libc::ENOSPC if self.verb == "ibv_wr_complete" => ErrorKind::QueueFull,
            libc::EINVAL | libc::EFAULT | libc::ERANGE | libc::EMSGSIZE => ErrorKind::InvalidInput,
            libc::ENOMEM | libc::EMFILE | libc::ENFILE | libc::ENOSPC | libc::EAGAIN => {
                ErrorKind::Resource
            }
            libc::EPERM | libc::EACCES => ErrorKind::Permission,
            libc::ENOENT | libc::ENODEV | libc::ENXIO | linux::ENODATA => ErrorKind::NotFound,
            libc::EOPNOTSUPP | libc::ENOSYS | libc::EPROTONOSUPPORT => ErrorKind::Unsupported,
            libc::EBUSY => ErrorKind::Busy,
            libc::ENETDOWN | libc::ENETUNREACH | libc::EHOSTUNREACH | libc::EADDRNOTAVAIL => {
                ErrorKind::Unreachable
            }
            libc::ETIMEDOUT => ErrorKind::TimedOut,
            libc::EINTR => ErrorKind::Interrupted,
            _ => ErrorKind::Driver,
        }
    }

    fn hint(&self) -> Option<&'static str> {
        Some(match (self.verb, self.errno) {
            ("ibv_reg_mr" | "ibv_reg_mr_iova" | "ibv_rereg_mr", libc::ENOMEM) => {
                "RLIMIT_MEMLOCK may be too low (ulimit -l), or the device has no region left"
            }
            // The process may not lock a single page.
            (
                "ibv_reg_mr" | "ibv_reg_mr_iova" | "ibv_rereg_mr" | "ibv_create_qp"
                | "ibv_create_cq" | "ibv_create_srq",
                libc::EPERM,
            ) => "RLIMIT_MEMLOCK may be 0 (ulimit -l), or the process may not do this",
            ("ibv_reg_mr" | "ibv_reg_mr_iova" | "ibv_rereg_mr", libc::EFAULT) => {
                "the memory is not mapped, or is read-only and write access was asked for"
            }
            ("ibv_dereg_mr", libc::EBUSY | libc::EINVAL) => {
                "a memory window is still bound to the region"
            }
            ("ibv_post_recv", libc::EINVAL) => {
                "the queue pair is in RESET, or the device takes no receive without memory (Soft-iWARP)"
            }
            ("ibv_create_qp" | "ibv_create_cq" | "ibv_create_srq", libc::ENOMEM) => {
                "the device has none left, or RLIMIT_MEMLOCK is too low (ulimit -l)"
            }
            ("ibv_open_device", libc::EACCES | libc::EPERM) => {
                "the process may not open /dev/infiniband/uverbs*"
            }
            ("ibv_get_device_list", libc::ENOSYS) => {
                "the kernel has no RDMA support (is the module ib_uverbs loaded?) or this process sees no /sys, and no device of software is registered \
                 (the crate ibverbs-software; dropping the guard of `register_if_none` takes it away)"
            }
            #[cfg(not(feature = "neigh"))]
            ("ibv_create_ah", libc::EIO) => {
                "the device may be gone, or its driver in an older kernel (Soft-RoCE's in Linux 5.10) \
                 leaves the peer's link address to the provider, which takes the feature neigh"
            }
            ("ibv_alloc_mw", libc::EOPNOTSUPP) => {
                "the device has no memory windows, or not with this kernel (Soft-RoCE: Linux 5.14)"
            }
            ("ibv_reg_dmabuf_mr", _) if self.kind() == ErrorKind::Unsupported => {
                "the device cannot, or the kernel is older than Linux 5.12"
            }
            ("ibv_alloc_dmah" | "ibv_reg_mr_ex", _) if self.kind() == ErrorKind::Unsupported => {
                "the device cannot, or the kernel is older than Linux 6.17"
            }
            // Soft-RoCE and Soft-iWARP queue the request before they tell the kernel.
            ("ibv_post_send" | "ibv_post_recv", libc::EPERM | libc::EACCES) => {
                "the process has changed its credentials, and the request may still be carried out: keep \
                 its memory until the queue pair was reset or destroyed, which a channel has done"
            }
            (_, libc::EMFILE) => "RLIMIT_NOFILE is used up (ulimit -n)",
            (_, libc::ENFILE) => "the machine's fs.file-max is used up",
            (_, libc::EAGAIN) => {
                "a limit may be used up: that of the RDMA control group (rdma.max), or the device's"
            }
            (verb, libc::ENODEV) if verb.starts_with("rdma_") => {
                "no RDMA device leads to the address (`rdma link` lists those of this network namespace, with their \
                 interfaces), or it is gone"
            }
            (_, libc::ENODEV | libc::EIO) => "the device may be gone",
            _ if self.kind() == ErrorKind::QueueFull => {
                "the queue is full: poll completions before posting more, or make it deeper"
            }
            _ => return None,
        })
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.verb)?;
        let system = io::Error::from_raw_os_error(self.errno);
        match self.detail {
            Detail::None => match self.hint() {
                Some(hint) => write!(f, "{system}; {hint}"),
                None => system.fmt(f),
            },
            Detail::Reason(reason) => f.write_str(reason),
            Detail::Range { what, value, low, high } if u64::from(low) > high => {
                write!(f, "{what} is {value}, but there are none")
            }
            Detail::Range { what, value, low, high } => {
                write!(f, "{what} is {value}, and must be within {low}..={high}")
            }
            Detail::Transition { problem, kind, from, to } => {
                let (from, to) = (QueuePairState::from(from), QueuePairState::from(to));
                match problem {
                    Problem::Missing(name) => write!(f, "{name} is missing for {from} to {to}")?,
                    Problem::NotAllowed(name) => {
                        write!(f, "{name} is not allowed for {from} to {to}")?;
                    }
                    Problem::Impossible => write!(f, "there is no way from {from} to {to}")?,
                }
                write!(f, " of {} queue pair", QueuePairType::from(kind).named())
            }
            Detail::Gids { ours: (our_class, ours), theirs: (their_class, theirs) } => write!(
                f,
                "no packet goes between our {} {ours} and the peer's {} {theirs}: both sides need an address \
                 of the same family, and the same version of RoCE",
                our_class.name(),
                their_class.name()
            ),
            Detail::Types { ours, theirs } => write!(
                f,
                "ours is {} queue pair, and the peer's {} one: they cannot be connected",
                ours.named(),
                theirs.named()
            ),
            Detail::Partitions { ours, theirs } => write!(
                f,
                "our P_Key is {ours:#06x}, and the peer's {theirs:#06x}: both need the same lower 15 bits, and one \
                 of them the upper bit (pkey_index chooses it from the port's table)"
            ),
            Detail::State { state, needed } => write!(
                f,
                "the queue pair is in {state}, and must be in {needed} before this is posted: \
                 connect it first"
            ),
            Detail::Holds { more_than, what } => {
                write!(f, "the queue holds more than {more_than} {what}")
            }
            Detail::GidIndex { index, port } => {
                write!(f, "the GID table of port {port} is empty at index {index}")
            }
            Detail::Path { ours, index, theirs } => write!(
                f,
                "no path from our GID {ours} (index {index}) to the peer's GID {theirs}: {system}"
            ),
        }
    }
}

/// A `main` that returns an error prints `Debug`.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for Error {}

impl From<Error> for io::Error {
    /// A plain errno error if there is no more to say; otherwise wraps the error.
    fn from(error: Error) -> Self {
        match error.detail {
            Detail::None if error.hint().is_none() => Self::from_raw_os_error(error.errno),
            _ => Self::new(Self::from_raw_os_error(error.errno).kind(), error),
        }
    }
}

/// The result of a verb.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a method that changes an object's state failed ([`error`](Self::error)), with the object for further use
/// ([`object`](Self::object)): the channel that could not be reset, or what could not be connected.
///
/// `?` drops the object and keeps the reason, as [`Error`], `TransportError`, `std::io::Error`
/// or `Box<dyn std::error::Error>`. For other errors, write `.map_err(|failed| failed.error)?`.
///
/// ```no_run
/// # // not on Soft-RoCE alone: needs a peer
/// use std::time::{Duration, Instant};
/// use ibverbs::tcp::ExchangeError;
/// use ibverbs::Channel;
///
/// /// Connects again after a failure, for a minute at most. The channel survives failed attempts.
/// fn reconnect(failed: Channel<'_>) -> Result<Channel<'_>, ExchangeError> {
///     let deadline = Instant::now() + Duration::from_secs(60);
///     let mut prepared = failed.reset()?;
///     loop {
///         let soon = Instant::now() + Duration::from_secs(1);
///         match prepared.connect("server:18515", b"", soon) {
///             Ok((channel, _)) => return Ok(channel),
///             Err(failed) if Instant::now() < deadline => prepared = failed.object,
///             Err(failed) => return Err(failed.error),
///         }
///     }
/// }
/// ```
///
/// It does not implement `std::error::Error`, because the object borrows.
pub struct StateError<T, E = Error> {
    /// The reason.
    pub error: E,
    /// The object, as before the call unless the method says otherwise.
    pub object: T,
}

impl<T, E> StateError<T, E> {
    /// The error of a method that gives back what it consumed.
    pub fn new(object: T, error: E) -> Self {
        Self { error, object }
    }
}

debug! { impl[T, E: fmt::Debug] StateError<T, E>, self, error: self.error, .. }

impl<T, E: fmt::Display> fmt::Display for StateError<T, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl<T> From<StateError<T>> for Error {
    /// Drops the object.
    fn from(failed: StateError<T>) -> Self {
        failed.error
    }
}

impl<T, E: Into<Self>> From<StateError<T, E>> for io::Error {
    /// Drops the object.
    fn from(failed: StateError<T, E>) -> Self {
        failed.error.into()
    }
}

impl<T, E: std::error::Error + 'static> From<StateError<T, E>> for Box<dyn std::error::Error> {
    /// Drops the object.
    fn from(failed: StateError<T, E>) -> Self {
        failed.error.into()
    }
}

impl<T, E> From<StateError<T, E>> for Box<dyn std::error::Error + Send + Sync>
where
    E: std::error::Error + Send + Sync + 'static,
{
    /// Drops the object.
    fn from(failed: StateError<T, E>) -> Self {
        failed.error.into()
    }
}

/// For an error from a function that is not inlined.
///
/// A result's discriminant lies within the error. The compiler does not know what such a function writes there,
/// so it would compile the success path again, for an `Ok` from there. `black_box` keeps it from dropping the
/// assumption too early as trivially true.
#[inline(always)]
pub(crate) fn err_from_call<T, E>(error: E) -> Result<T, E> {
    let result = hint::black_box(Err(error));
    // SAFETY: the line above made it an `Err`.
    unsafe { hint::assert_unchecked(result.is_err()) };
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_errno_has_its_kind() {
        for (verb, errno, kind) in [
            ("ibv_reg_mr", libc::EINVAL, ErrorKind::InvalidInput),
            ("ibv_reg_mr", libc::ENOMEM, ErrorKind::Resource),
            ("ibv_post_send", libc::ENOMEM, ErrorKind::QueueFull),
            ("ibv_wr_complete", libc::ENOSPC, ErrorKind::QueueFull),
            ("ibv_open_device", libc::EACCES, ErrorKind::Permission),
            ("ibv_open_device", libc::ENODEV, ErrorKind::NotFound),
            ("ibv_alloc_dm", libc::EOPNOTSUPP, ErrorKind::Unsupported),
            ("ibv_dealloc_pd", libc::EBUSY, ErrorKind::Busy),
            ("ibv_create_qp", libc::ENETDOWN, ErrorKind::Unreachable),
            ("ibv_modify_qp", libc::ENETUNREACH, ErrorKind::Unreachable),
            ("ibv_modify_qp", libc::ETIMEDOUT, ErrorKind::TimedOut),
            ("ibv_modify_qp", 0, ErrorKind::Driver),
            ("ibv_modify_qp", 9999, ErrorKind::Driver),
        ] {
            assert_eq!(Error::new(verb, errno).kind(), kind, "{verb} {errno}");
        }
    }

    #[test]
    fn display_says_what_and_what_to_do() {
        for (verb, errno, part) in [
            ("ibv_reg_mr", libc::ENOMEM, "RLIMIT_MEMLOCK may be too low"),
            ("ibv_reg_mr", libc::EPERM, "RLIMIT_MEMLOCK may be 0"),
            ("ibv_rereg_mr", libc::EFAULT, "is not mapped"),
            ("ibv_dereg_mr", libc::EBUSY, "a memory window is still bound"),
            ("ibv_post_recv", libc::EINVAL, "is in RESET"),
            ("ibv_post_send", libc::EACCES, "may still be carried out"),
            ("ibv_create_cq", libc::ENOMEM, "has none left"),
            ("ibv_open_device", libc::EACCES, "/dev/infiniband"),
            ("ibv_get_device_list", libc::ENOSYS, "ib_uverbs"),
            ("ibv_alloc_mw", libc::EOPNOTSUPP, "Linux 5.14"),
            ("ibv_reg_dmabuf_mr", libc::EPROTONOSUPPORT, "older than Linux 5.12"),
            ("ibv_alloc_dmah", libc::EOPNOTSUPP, "older than Linux 6.17"),
            ("ibv_open_device", libc::EMFILE, "RLIMIT_NOFILE"),
            ("ibv_open_device", libc::ENFILE, "fs.file-max"),
            ("ibv_create_qp", libc::EAGAIN, "rdma.max"),
            ("ibv_query_qp", libc::EIO, "the device may be gone"),
            ("rdma_listen", libc::ENODEV, "no RDMA device leads to the address"),
        ] {
            let text = Error::new(verb, errno).to_string();
            assert!(text.starts_with(&format!("{verb}: ")) && text.contains(part), "{text}");
        }
        #[cfg(not(feature = "neigh"))]
        assert!(Error::new("ibv_create_ah", libc::EIO).to_string().contains("feature neigh"));
        let text = Error::out_of_range("ibv_query_gid", "GID index", 9, 0, 3).to_string();
        assert_eq!(text, "ibv_query_gid: GID index is 9, and must be within 0..=3");
        let text = Error::invalid("ibv_modify_qp", "path_mtu is missing").to_string();
        assert_eq!(text, "ibv_modify_qp: path_mtu is missing");
    }

    #[test]
    fn debug_says_the_same() {
        let error = Error::new("ibv_reg_mr", libc::ENOMEM);
        assert_eq!(format!("{error:?}"), error.to_string());
        let boxed: Box<dyn std::error::Error> = error.into();
        assert!(format!("{boxed:?}").contains("RLIMIT_MEMLOCK"));
    }

    #[test]
    fn io_error_keeps_the_errno_or_the_words() {
        let plain = io::Error::from(Error::new("ibv_dealloc_pd", libc::EBUSY));
        assert_eq!(plain.raw_os_error(), Some(libc::EBUSY));
        let rich = io::Error::from(Error::invalid("ibv_reg_mr", "the region is empty"));
        assert_eq!(rich.kind(), io::ErrorKind::InvalidInput);
        assert!(rich.to_string().contains("the region is empty"));
    }

    #[test]
    fn an_error_is_small() {
        assert!(size_of::<Result<()>>() <= 64);
    }
}
