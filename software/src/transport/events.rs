//! The files that programs read events from: a completion channel's, and a context's for asynchronous events.
//!
//! Each is a datagram socket that is connected to itself, so that one descriptor is both ends: records
//! stay whole, closing it leaves no other end behind, and writing and taking back never block,
//! even if the owner has put the file into blocking mode.

use std::cell::Cell;
use std::ffi::c_int;
use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, IntoRawFd};
use std::os::unix::net::UnixDatagram;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::ffi::ibv_event_type;
use crate::link::unix_sockets::{deaf, hear};

/// Makes such a file. Its owner closes it.
pub(crate) fn create() -> io::Result<c_int> {
    create_and(|_| ())
}

/// `named` is called while the file has a name and no peer, when any user can send to it.
fn create_and(named: impl FnOnce(&UnixDatagram)) -> io::Result<c_int> {
    let socket = deaf(b"")?;
    named(&socket);
    // From here on, the kernel refuses what others send.
    socket.connect_addr(&socket.local_addr()?)?;
    hear(&socket)?;
    // The most that an ordinary user may have. A full file loses no event: see `Core::notify`.
    let wanted: c_int = 1 << 20;
    let size = size_of::<c_int>() as libc::socklen_t;
    for option in [libc::SO_SNDBUF, libc::SO_RCVBUF] {
        let (fd, value) = (socket.as_raw_fd(), (&raw const wanted).cast());
        // SAFETY: the value is a live integer of that size.
        unsafe { libc::setsockopt(fd, libc::SOL_SOCKET, option, value, size) };
    }
    Ok(socket.into_raw_fd())
}

/// The longest record: `struct ib_uverbs_async_event_desc`.
const LONGEST: usize = 16;

/// A record in such a file, which begins with the object that it is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    bytes: [u8; LONGEST],
    length: usize,
}

impl Record {
    /// `struct ib_uverbs_comp_event_desc`.
    pub(crate) fn completion(handle: u64) -> Self {
        let mut bytes = [0; LONGEST];
        bytes[..8].copy_from_slice(&handle.to_ne_bytes());
        Self { bytes, length: 8 }
    }

    /// `struct ib_uverbs_async_event_desc`.
    pub(crate) fn asynchronous(element: u64, kind: u32) -> Self {
        let mut bytes = [0; LONGEST];
        bytes[..8].copy_from_slice(&element.to_ne_bytes());
        bytes[8..12].copy_from_slice(&kind.to_ne_bytes());
        Self { bytes, length: 16 }
    }

    /// Whether it is an asynchronous event of that kind.
    pub(crate) fn is(&self, kind: ibv_event_type) -> bool {
        self.length == LONGEST && self.bytes[8..12] == kind.0.to_ne_bytes()
    }

    pub(crate) fn element(&self) -> u64 {
        let mut element = [0; 8];
        element.copy_from_slice(&self.bytes[..8]);
        u64::from_ne_bytes(element)
    }
}

thread_local! {
    /// How many records this thread has written.
    static WRITTEN: Cell<u64> = const { Cell::new(0) };
}

/// Changes when this thread writes an event.
pub(crate) fn written() -> u64 {
    WRITTEN.get()
}

/// Puts a record in, if there is room.
pub(crate) fn put(fd: c_int, record: &Record) -> bool {
    WRITTEN.set(WRITTEN.get() + 1);
    // SAFETY: the record is that long.
    let sent = unsafe {
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        libc::send(fd, record.bytes.as_ptr().cast(), record.length, flags)
    };
    // If the file is closed, no reader misses the event.
    sent >= 0
        || !matches!(io::Error::last_os_error().raw_os_error(), Some(libc::EAGAIN | libc::ENOBUFS))
}

/// Whether a file was ended in this process.
static ENDED: AtomicBool = AtomicBool::new(false);

/// Nothing is put in any more, and threads that sleep wake. A read that does not wait still gets `EAGAIN`, as from datagram
/// sockets: [`is_ended`] tells the difference.
pub(crate) fn end(fd: c_int) {
    ENDED.store(true, Ordering::Relaxed);
    // SAFETY: no memory is involved.
    unsafe { libc::shutdown(fd, libc::SHUT_RDWR) };
}

/// Whether any file was ended: else no file needs to be asked.
pub(crate) fn is_any_ended() -> bool {
    ENDED.load(Ordering::Relaxed)
}

/// Whether this file was ended.
pub(crate) fn is_ended(fd: c_int) -> bool {
    let mut file = libc::pollfd { fd, events: 0, revents: 0 };
    // SAFETY: one live structure.
    unsafe { libc::poll(&mut file, 1, 0) == 1 && file.revents & libc::POLLHUP != 0 }
}

/// Takes back the unread records that are about `element`, whose object is going away; returns how many.
pub(crate) fn take_back(fd: c_int, mut gone: impl FnMut(&Record) -> bool) -> u32 {
    let (mut kept, mut taken) = (Vec::new(), 0);
    loop {
        let mut record = Record { bytes: [0; LONGEST], length: 0 };
        // SAFETY: the buffer has room for as much.
        let received = unsafe {
            libc::recv(fd, record.bytes.as_mut_ptr().cast(), LONGEST, libc::MSG_DONTWAIT)
        };
        let Ok(length @ 1..) = usize::try_from(received) else { break };
        record.length = length;
        if gone(&record) {
            taken += 1;
        } else {
            kept.push(record);
        }
    }
    for record in kept {
        put(fd, &record);
    }
    taken
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::{FromRawFd, OwnedFd};

    #[test]
    fn records_are_read_in_order_and_taken_back() {
        // SAFETY: the descriptor is ours.
        let file = unsafe { OwnedFd::from_raw_fd(create().unwrap()) };
        let fd = file.as_raw_fd();
        for element in [1, 2, 1, 3] {
            assert!(put(fd, &Record::completion(element)));
        }
        assert_eq!(take_back(fd, |record| record.element() == 1), 2);
        let mut seen = Vec::new();
        take_back(fd, |record| {
            seen.push(record.element());
            true
        });
        assert_eq!(seen, [2, 3]);
    }

    /// A record has the address of an object: none may come from anyone else.
    #[test]
    fn no_stranger_puts_a_record_in() {
        let stranger = UnixDatagram::unbound().unwrap();
        let mut name = None;
        let named = |file: &UnixDatagram| {
            name = file.local_addr().ok();
            stranger.send_to_addr(&[0x41; 8], name.as_ref().unwrap()).unwrap();
        };
        // SAFETY: the descriptor is ours.
        let file = unsafe { OwnedFd::from_raw_fd(create_and(named).unwrap()) };
        assert!(stranger.send_to_addr(&[0x41; 8], &name.unwrap()).is_err());
        let own = Record::completion(1);
        assert!(put(file.as_raw_fd(), &own));
        assert_eq!(take_back(file.as_raw_fd(), |record| *record == own), 1);
        assert_eq!(take_back(file.as_raw_fd(), |_| true), 0, "a stranger's");
    }

    #[test]
    fn a_full_file_refuses_and_does_not_wait() {
        // SAFETY: the descriptor is ours.
        let file = unsafe { OwnedFd::from_raw_fd(create().unwrap()) };
        let fd = file.as_raw_fd();
        let mut room = 0;
        while put(fd, &Record::asynchronous(room, 3)) {
            room += 1;
        }
        assert!(room > 100, "{room}");
        assert_eq!(u64::from(take_back(fd, |_| true)), room);
        assert!(put(fd, &Record::completion(1)));
    }

    /// Another file may get the number of one that was closed: it must not get its events.
    #[test]
    fn events_that_did_not_fit_are_forgotten_with_their_file() {
        use std::net::IpAddr;
        use std::sync::Arc;
        use std::sync::atomic::Ordering;

        use super::super::Engine;
        use super::super::rig::{MemoryLink, Sent, VirtualClock};
        use crate::builder::Builder;

        // SAFETY: the descriptor is ours.
        let file = unsafe { OwnedFd::from_raw_fd(create().unwrap()) };
        let fd = file.as_raw_fd();
        let clock = Arc::new(VirtualClock::default());
        let settings = Builder::new().port([IpAddr::from([127, 9, 9, 1])]).settings();
        let mut engine =
            Engine::new(settings, clock.clone(), Box::new(MemoryLink::new(&Sent::default())));
        engine.core.contexts.insert(0, fd);
        for is_forgotten in [false, true] {
            while engine.due().is_none() {
                engine.core.raise(0, ibv_event_type::IBV_EVENT_DEVICE_FATAL, 0);
            }
            assert!(take_back(fd, |_| true) > 100, "it was full");
            if is_forgotten {
                engine.core.forget_file(fd);
            }
            clock.0.fetch_max(engine.due().unwrap(), Ordering::Relaxed);
            engine.advance();
            assert_eq!(take_back(fd, |_| true), u32::from(!is_forgotten));
        }
    }
}
