//! The streams over which two sides have connected: the end of one is that of the peer's process.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};
use rustix::io::{Errno, write};

/// No stream has this number.
const STOP: u64 = u64::MAX;

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

    /// Watches for the end of the stream of the member with this index. It is watched until it is closed.
    pub(crate) fn add(&self, socket: BorrowedFd<'_>, index: usize) -> io::Result<()> {
        // Once: what has ended stays so.
        let flags = EventFlags::RDHUP | EventFlags::ONESHOT;
        Ok(epoll::add(&self.epoll, socket, EventData::new_u64(index as u64), flags)?)
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

    /// The indexes of those that have ended; or `None` when it is to [stop](Self::stop).
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
