//! A file that a program writes commands to, and waits for events with: one end of a pair of sockets. It is readable while
//! events wait.

use std::collections::VecDeque;
use std::ffi::c_int;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use super::abi::Kind;
use crate::driver::Shared;
use crate::event_files::inode;
use crate::transport::connection::{Event, Outlet};

/// An event that the program has not read.
#[derive(Debug)]
pub(super) struct Item {
    /// The identifier that it is about; a listener for a request.
    pub(super) id: u32,
    pub(super) what: What,
}

#[derive(Debug)]
pub(super) enum What {
    /// An event of a connection of this device.
    Connection(Weak<Shared>, Event),
    Plain(Kind, i32),
    /// Written by the program itself: what, status, argument.
    Written(u32, i32, [u8; 8]),
    /// The group that was joined.
    Joined(u32),
}

impl From<(u32, What)> for Item {
    fn from((id, what): (u32, What)) -> Self {
        Self { id, what }
    }
}

#[derive(Debug)]
pub(super) struct Queue {
    items: Mutex<VecDeque<Item>>,
    /// The other end of the pair.
    event: OwnedFd,
    file: c_int,
    inode: u64,
}

impl Queue {
    /// The caller owns the file, and closes it.
    pub(super) fn new() -> io::Result<Arc<Self>> {
        let mut pair = [0; 2];
        // SAFETY: there is room for both descriptors; they are new, and one of them is ours alone.
        let event = unsafe {
            let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC;
            if libc::socketpair(libc::AF_UNIX, kind, 0, pair.as_mut_ptr()) != 0 {
                return Err(io::Error::last_os_error());
            }
            OwnedFd::from_raw_fd(pair[1])
        };
        let inode = inode(pair[0]).unwrap_or_default();
        Ok(Arc::new(Self { items: Mutex::default(), event, file: pair[0], inode }))
    }

    pub(super) fn file(&self) -> c_int {
        self.file
    }

    /// Whether the descriptor is this file still: the program may have closed it without telling.
    pub(super) fn is_open(&self) -> bool {
        inode(self.file) == Some(self.inode)
    }

    pub(super) fn inode(&self) -> u64 {
        self.inode
    }

    fn items(&self) -> MutexGuard<'_, VecDeque<Item>> {
        self.items.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn push(&self, item: Item) {
        let mut items = self.items();
        items.push_back(item);
        // A full socket is readable already.
        // SAFETY: one byte is read from a live constant.
        unsafe {
            let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
            libc::send(self.event.as_raw_fd(), [1_u8].as_ptr().cast(), 1, flags);
        }
    }

    /// `own`: the descriptor of the file that a waiting thread has for itself.
    pub(super) fn pop(&self, own: Option<c_int>) -> Option<Item> {
        let mut items = self.items();
        let item = items.pop_front();
        self.lower(&items, own);
        item
    }

    /// Takes back what is about an identifier that goes away.
    pub(super) fn take_back(&self, is_gone: impl Fn(&Item) -> bool) -> Vec<Item> {
        let mut items = self.items();
        let (gone, kept) = std::mem::take(&mut *items).into_iter().partition(is_gone);
        *items = VecDeque::from(kept);
        self.lower(&items, None);
        gone
    }

    /// Without events the file is not readable.
    fn lower(&self, items: &VecDeque<Item>, own: Option<c_int>) {
        let file = own.or_else(|| self.is_open().then_some(self.file));
        if let (true, Some(file)) = (items.is_empty(), file) {
            let mut bytes = [0_u8; 512];
            // SAFETY: the buffer has that many bytes.
            while unsafe {
                let (to, size) = (bytes.as_mut_ptr().cast(), bytes.len());
                libc::recv(file, to, size, libc::MSG_DONTWAIT)
            } == bytes.len() as isize
            {}
        }
    }
}

/// Where the events of a device's connections go.
#[derive(Debug)]
pub(super) struct Inlet {
    pub(super) queue: Arc<Queue>,
    pub(super) device: Arc<Shared>,
}

/// Does not keep the device.
#[derive(Debug)]
struct Held {
    queue: Arc<Queue>,
    device: Weak<Shared>,
}

impl Inlet {
    pub(super) fn outlet(self) -> Arc<dyn Outlet> {
        let Self { queue, device } = self;
        Arc::new(Held { queue, device: Arc::downgrade(&device) })
    }
}

impl Outlet for Held {
    fn tell(&self, id: u32, event: Event) {
        self.queue.push((id, What::Connection(self.device.clone(), event)).into());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::{wait, wait_for};

    #[test]
    fn the_file_is_readable_while_events_wait() {
        let queue = Queue::new().unwrap();
        // SAFETY: the file is new, and nobody else's.
        let file = unsafe { OwnedFd::from_raw_fd(queue.file()) };
        let is_readable = || wait(&mut [wait_for(queue.file())], Some(std::time::Duration::ZERO));
        assert!(!is_readable());
        for id in 0..600_000 {
            queue.push((id, What::Plain(Kind::Established, 0)).into());
            if id > 2000 {
                break;
            }
        }
        assert!(is_readable());
        assert_eq!(queue.take_back(|item| item.id % 2 == 0).len(), 1001);
        while let Some(item) = queue.pop(None) {
            assert!(item.id % 2 == 1);
        }
        assert!(!is_readable());
        queue.push((1, What::Plain(Kind::Established, 0)).into());
        assert!(is_readable());
        queue.take_back(|_| true);
        assert!(!is_readable() && queue.is_open());
        drop(file);
        assert!(!queue.is_open());
        queue.push((1, What::Plain(Kind::Established, 0)).into());
        assert!(queue.pop(None).is_some());
    }
}
