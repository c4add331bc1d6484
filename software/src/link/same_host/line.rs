//! A connection of another process, as far as it tells of that process's end.

use std::ffi::c_int;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use crate::files::Epoll;

/// A connection that is waited for.
#[derive(Debug)]
pub(super) struct Line {
    connection: Arc<OwnedFd>,
    all: Arc<Epoll>,
}

impl Line {
    /// Adds the connection to all those that are waited for, until this is dropped.
    pub(super) fn new(connection: Arc<OwnedFd>, all: &Arc<Epoll>) -> io::Result<Self> {
        all.add(connection.as_raw_fd())?;
        Ok(Self { connection, all: all.clone() })
    }

    pub(super) fn connection(&self) -> &OwnedFd {
        &self.connection
    }

    pub(super) fn fd(&self) -> c_int {
        self.connection.as_raw_fd()
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        self.all.remove(self.fd());
    }
}
