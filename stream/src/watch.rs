//! What tells that a peer's process is gone.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

#[cfg(feature = "rdmacm")]
use ibverbs::rdmacm::{ConnectionControl, ConnectionEventKind};
use ibverbs::tcp::peer_has_closed;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};
use rustix::io::{Errno, write};

/// No stream has this number.
const STOP: u64 = u64::MAX;

/// Over which two sides have connected. Its end is that of the peer.
pub(crate) enum Lifeline {
    Socket(OwnedFd),
    #[cfg(feature = "rdmacm")]
    Control(Box<ConnectionControl>),
    /// A task has the stream, and ends the other one itself.
    #[cfg(feature = "tokio")]
    Task(Task),
}

/// A task that ends when this is dropped.
#[cfg(feature = "tokio")]
pub(crate) struct Task(pub(crate) ::tokio::task::JoinHandle<()>);

#[cfg(feature = "tokio")]
impl Drop for Task {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Lifeline {
    pub(crate) fn has_ended(&mut self) -> bool {
        match self {
            Self::Socket(socket) => peer_has_closed(socket).unwrap_or(false),
            #[cfg(feature = "tokio")]
            Self::Task(task) => task.0.is_finished(),
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

    /// What happens to its file, if it has one, at the end and perhaps before.
    fn file(&self) -> Option<(BorrowedFd<'_>, EventFlags)> {
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
    pub(crate) fn new() -> io::Result<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        epoll::add(&epoll, &stop, EventData::new_u64(STOP), EventFlags::IN)?;
        Ok(Self { epoll, stop })
    }

    /// Watches for the end of the member with this index. It is watched until it is closed, or may have ended.
    pub(crate) fn add(&self, line: &Lifeline, index: usize) -> io::Result<()> {
        let Some((file, events)) = line.file() else { return Ok(()) };
        Ok(epoll::add(&self.epoll, file, EventData::new_u64(index as u64), events)?)
    }

    /// It had not ended: watches it again.
    pub(crate) fn add_again(&self, line: &Lifeline, index: usize) -> io::Result<()> {
        let Some((file, events)) = line.file() else { return Ok(()) };
        Ok(epoll::modify(&self.epoll, file, EventData::new_u64(index as u64), events)?)
    }

    /// Whoever sleeps here is to end.
    pub(crate) fn stop(&self) {
        // It fails only if it was written to before.
        let _ = write(&self.stop, &1_u64.to_ne_bytes());
    }

    /// A file that is readable when it is to [stop](Self::stop).
    pub(crate) fn stopped(&self) -> BorrowedFd<'_> {
        self.stop.as_fd()
    }

    /// The indexes of those that may have ended; or `None` when it is to [stop](Self::stop).
    pub(crate) fn ended(&self, waits: bool) -> Option<Vec<usize>> {
        let mut events = [const { std::mem::MaybeUninit::<Event>::uninit() }; 64];
        let zero = Timespec::default();
        let found = loop {
            match epoll::wait(&self.epoll, &mut events, if waits { None } else { Some(&zero) }) {
                Err(Errno::INTR) => {}
                Err(_) => return None,
                Ok((events, _)) => break events.to_vec(),
            }
        };
        let numbers = found.iter().map(|event| event.data.u64());
        let is_over = numbers.clone().any(|number| number == STOP);
        if is_over { None } else { Some(numbers.map(|number| number as usize).collect()) }
    }
}

impl AsFd for Sockets {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}
