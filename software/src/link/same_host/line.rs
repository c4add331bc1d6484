//! How another process wakes this one, and what tells of its end.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use crate::files::{Bell, Epoll, WakeFd};
use crate::foreign::Foreign;

/// A connection, with a bell that is handed over by it. Both are waited for until this is dropped.
#[derive(Debug)]
pub(super) struct Line {
    connection: Arc<Foreign>,
    bell: Bell,
    wake_fd: Arc<WakeFd>,
    ends: Arc<Epoll>,
}

impl Line {
    /// Makes the bell. Until the line is dropped, the other process wakes the threads that wait for `wake_fd` when it rings, and
    /// those that wait for `ends` when it ends the connection.
    pub(super) fn new(
        connection: Arc<Foreign>,
        wake_fd: &Arc<WakeFd>,
        ends: &Arc<Epoll>,
    ) -> io::Result<Self> {
        let bell = Bell::new()?;
        wake_fd.add(&bell)?;
        let line = Self { connection, bell, wake_fd: wake_fd.clone(), ends: ends.clone() };
        ends.add(line.connection.as_raw_fd(), libc::EPOLLRDHUP, 0)?;
        Ok(line)
    }

    pub(super) fn connection(&self) -> &OwnedFd {
        &self.connection
    }

    pub(super) fn bell(&self) -> &Bell {
        &self.bell
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        self.wake_fd.remove(&self.bell);
        self.ends.remove(self.connection.as_raw_fd());
    }
}
