//! Watching connections whose end says that a peer's process is gone.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

#[cfg(feature = "rdmacm")]
use ibverbs::rdmacm::{ConnectionControl, ConnectionEventKind};
use ibverbs::tcp::peer_has_closed;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};
use rustix::io::{Errno, write};

/// No stream has these numbers.
const STOP: u64 = u64::MAX;
const DEVICE: u64 = u64::MAX - 1;

/// The [index](Sockets::ended) of the device, in place of a stream's.
pub(crate) const OF_DEVICE: usize = DEVICE as usize;

/// The connection used for set-up. When it closes, the peer is gone.
pub(crate) enum PeerWatch {
    Socket(OwnedFd),
    #[cfg(feature = "rdmacm")]
    Control(Box<ConnectionControl>),
    /// A task reads the connection, and tells the hub of the end.
    #[cfg(feature = "tokio")]
    Task(Task),
}

/// A task of a runtime of tokio, and how it is started. It ends when this is dropped, or with its runtime; the connection stays
/// open as long as this.
#[cfg(feature = "tokio")]
pub(crate) struct Task {
    task: ::tokio::task::JoinHandle<()>,
    start: Box<dyn Fn() -> ::tokio::task::JoinHandle<()> + Send>,
}

#[cfg(feature = "tokio")]
impl Task {
    pub(crate) fn new(start: impl Fn() -> ::tokio::task::JoinHandle<()> + Send + 'static) -> Self {
        Self { task: start(), start: Box::new(start) }
    }

    /// Starts it in the current runtime, if its own has ended.
    pub(crate) fn start_again(&mut self) {
        if self.task.is_finished() {
            self.task = (self.start)();
        }
    }
}

#[cfg(feature = "tokio")]
impl Drop for Task {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl PeerWatch {
    pub(crate) fn has_ended(&mut self) -> bool {
        match self {
            Self::Socket(socket) => peer_has_closed(socket).unwrap_or(false),
            // The task tells the hub itself.
            #[cfg(feature = "tokio")]
            Self::Task(_) => false,
            #[cfg(feature = "rdmacm")]
            Self::Control(control) => loop {
                use ConnectionEventKind as Kind;
                match control.event().map(|event| event.map(|event| event.kind())) {
                    Ok(None) => return false,
                    Ok(Some(Kind::Disconnected | Kind::Rejected | Kind::DeviceRemoved))
                    | Err(_) => return true,
                    Ok(Some(_)) => {}
                }
            },
        }
    }

    /// The file to watch, if there is one, with the events that come at the end and perhaps before.
    pub(crate) fn file(&self) -> Option<(BorrowedFd<'_>, EventFlags)> {
        // Once: what has ended stays so.
        match self {
            Self::Socket(socket) => Some((socket.as_fd(), EventFlags::RDHUP | EventFlags::ONESHOT)),
            #[cfg(feature = "rdmacm")]
            Self::Control(control) => Some((control.as_fd(), EventFlags::IN | EventFlags::ONESHOT)),
            #[cfg(feature = "tokio")]
            Self::Task(_) => None,
        }
    }
}

/// One descriptor for all of a hub.
pub(crate) struct Sockets {
    epoll: OwnedFd,
    stop: OwnedFd,
}

impl Sockets {
    /// `device`: the file of the device's events, if it has one.
    pub(crate) fn new(device: Option<BorrowedFd<'_>>) -> io::Result<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        epoll::add(&epoll, &stop, EventData::new_u64(STOP), EventFlags::IN)?;
        if let Some(device) = device {
            // The program reads the events, or leaves them. The hub is told of each one once.
            let events = EventFlags::IN | EventFlags::ET;
            epoll::add(&epoll, device, EventData::new_u64(DEVICE), events)?;
        }
        Ok(Self { epoll, stop })
    }

    /// Watches for the end of the member with this index. It is watched until it is closed, or may have ended.
    pub(crate) fn add(&self, line: &PeerWatch, index: usize) -> io::Result<()> {
        let Some((file, events)) = line.file() else { return Ok(()) };
        Ok(epoll::add(&self.epoll, file, EventData::new_u64(index as u64), events)?)
    }

    /// Watches a connection again that had not ended.
    pub(crate) fn add_again(&self, line: &PeerWatch, index: usize) -> io::Result<()> {
        let Some((file, events)) = line.file() else { return Ok(()) };
        Ok(epoll::modify(&self.epoll, file, EventData::new_u64(index as u64), events)?)
    }

    /// The thread that sleeps here wakes and ends.
    pub(crate) fn stop(&self) {
        // The write fails only after earlier ones.
        let _ = write(&self.stop, &1_u64.to_ne_bytes());
    }

    /// A file that is readable when it is to [stop](Self::stop).
    pub(crate) fn stopped(&self) -> BorrowedFd<'_> {
        self.stop.as_fd()
    }

    /// The indexes of the streams whose peers may have ended, and [`OF_DEVICE`] if the device may have; or `None` when it is to [stop](Self::stop). `waits` until there are
    /// any.
    pub(crate) fn ended(&self, waits: bool) -> Option<Vec<usize>> {
        let (zero, mut indexes) = (Timespec::default(), Vec::new());
        let mut timeout = if waits { None } else { Some(&zero) };
        loop {
            let mut events = [const { std::mem::MaybeUninit::<Event>::uninit() }; 64];
            let found = match epoll::wait(&self.epoll, &mut events, timeout) {
                Err(Errno::INTR) => continue,
                Err(_) => return None,
                Ok((events, _)) => events,
            };
            for event in &*found {
                match event.data.u64() {
                    STOP => return None,
                    index => indexes.push(index as usize),
                }
            }
            // A caller that is told of an event once sees all of them.
            if found.len() < 64 {
                return Some(indexes);
            }
            timeout = Some(&zero);
        }
    }
}

impl AsFd for Sockets {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}
