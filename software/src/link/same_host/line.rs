//! A connection of another process, by which it wakes this one, and which tells of its end.

use std::ffi::c_int;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use crate::files::WakeFd;

/// A connection that is waited for.
#[derive(Debug)]
pub(super) struct Line {
    connection: Arc<OwnedFd>,
    all: Arc<WakeFd>,
}

impl Line {
    /// Adds the connection to all those that are waited for, until this is dropped.
    pub(super) fn new(connection: Arc<OwnedFd>, all: &Arc<WakeFd>) -> io::Result<Self> {
        all.add(connection.as_raw_fd())?;
        Ok(Self { connection, all: all.clone() })
    }

    pub(super) fn connection(&self) -> &Arc<OwnedFd> {
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
