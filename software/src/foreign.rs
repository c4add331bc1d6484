//! Files that other processes have sent, or can send files to. To close one may take as long as another process likes: the kernel
//! waits for a socket's unsent data (`SO_LINGER`), for the server of a file system (FUSE), or for a process that polls the file. So
//! one thread of this process closes them all, and only that thread waits.

use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::Builder;

use ibverbs::device::forks;

use crate::threads::without_signals;

/// While more files wait to be closed, no other process is let in or asked. Tests that run beside each other have more.
const MOST: usize = if cfg!(test) { 4096 } else { 64 };

/// The files that wait to be closed.
struct Closer {
    files: Vec<OwnedFd>,
    /// The thread runs, in the process that has this value of [`forks`].
    runs: Option<u32>,
}

static CLOSER: Mutex<Closer> = Mutex::new(Closer { files: Vec::new(), runs: None });
static MORE: Condvar = Condvar::new();

fn closer() -> MutexGuard<'static, Closer> {
    CLOSER.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether many files wait to be closed.
pub(crate) fn is_behind() -> bool {
    closer().files.len() > MOST
}

fn close(file: OwnedFd) {
    let mut closer = closer();
    closer.files.push(file);
    if closer.runs != Some(forks()) {
        // Without a thread, files stay open until the next one is closed.
        let thread = Builder::new().name("closes-files".into()).spawn(|| without_signals(run));
        closer.runs = thread.is_ok().then(forks);
    }
    MORE.notify_one();
}

fn run() {
    let mut all = closer();
    loop {
        match all.files.pop() {
            Some(file) => {
                drop(all);
                drop(file);
                all = closer();
            }
            None => all = MORE.wait(all).unwrap_or_else(PoisonError::into_inner),
        }
    }
}

/// Such a file. Who drops it does not wait.
#[derive(Debug)]
pub(crate) struct Foreign {
    file: ManuallyDrop<OwnedFd>,
    is_connection: bool,
}

impl Foreign {
    /// A file that another process has, too.
    pub(crate) fn file(file: OwnedFd) -> Self {
        Self { file: ManuallyDrop::new(file), is_connection: false }
    }

    /// A connection to another process, which learns of its end at once.
    pub(crate) fn connection(file: OwnedFd) -> Self {
        Self { file: ManuallyDrop::new(file), is_connection: true }
    }

    /// The file, which no other process has, nor can send to.
    pub(crate) fn into_own(self) -> OwnedFd {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: it is used no more, and not dropped.
        unsafe { ManuallyDrop::take(&mut this.file) }
    }
}

impl Deref for Foreign {
    type Target = OwnedFd;

    fn deref(&self) -> &OwnedFd {
        &self.file
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        // SAFETY: it is used no more.
        let file = unsafe { ManuallyDrop::take(&mut self.file) };
        if self.is_connection {
            // SAFETY: no memory is involved. To shut a Unix socket down takes no time.
            unsafe { libc::shutdown(file.as_raw_fd(), libc::SHUT_RDWR) };
        }
        close(file);
    }
}
