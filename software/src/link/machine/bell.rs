//! The connections of other processes, as far as they wake a reader.

use std::ffi::c_int;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use crate::files::Epoll;

/// A connection whose other end wakes us.
#[derive(Debug)]
pub(super) struct Bell {
    connection: Arc<OwnedFd>,
    all: Arc<Epoll>,
}

impl Bell {
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

impl Drop for Bell {
    fn drop(&mut self) {
        self.all.remove(self.fd());
    }
}
