//! XRC domains, by the handles that programs have of them.

use std::ffi::c_int;
use std::os::fd::OwnedFd;

use super::table::{Table, Tag};

/// The file that an XRC domain belongs to.
#[derive(Debug)]
pub(crate) struct XrcFile {
    /// The file system, and the inode in it.
    pub(crate) inode: (u64, u64),
    /// Keeps the inode, so that no other file gets its number.
    pub(crate) _open: OwnedFd,
}

/// A handle of an XRC domain. Those of the same file are handles of one domain.
#[derive(Debug)]
struct Handle {
    domain: u64,
    file: Option<XrcFile>,
    /// How many queue pairs and shared receive queues were made with this handle.
    users: u32,
}

/// The handles of XRC domains.
#[derive(Debug)]
pub(crate) struct XrcDomains {
    handles: Table<Handle>,
    /// The last domain that was made.
    last: u64,
}

impl XrcDomains {
    pub(crate) fn new() -> Self {
        Self { handles: Table::new(Tag::Low, 1, u32::MAX), last: 0 }
    }

    pub(crate) fn count(&self) -> usize {
        self.handles.len()
    }

    /// Which domain a handle is of.
    pub(crate) fn domain(&self, handle: u32) -> Option<u64> {
        self.handles.get(handle).map(|handle| handle.domain)
    }

    /// Opens the domain of a file, or a private one.
    pub(crate) fn open(
        &mut self,
        file: Option<XrcFile>,
        create: bool,
        exclusive: bool,
    ) -> Result<u32, c_int> {
        let found = file.as_ref().and_then(|file| {
            let inode = |handle: &Handle| handle.file.as_ref().map(|file| file.inode);
            let mut handles = self.handles.iter();
            handles.find(|(_, handle)| inode(handle) == Some(file.inode)).map(|(_, h)| h.domain)
        });
        match found {
            Some(_) if exclusive => return Err(libc::EINVAL),
            None if file.is_some() && !create => return Err(libc::EAGAIN),
            _ => {}
        }
        let domain = found.unwrap_or_else(|| {
            self.last += 1;
            self.last
        });
        self.handles.insert(|_| Handle { domain, file, users: 0 }).ok_or(libc::ENOMEM)
    }

    pub(crate) fn close(&mut self, handle: u32) -> Result<(), c_int> {
        if self.handles.get(handle).ok_or(libc::EINVAL)?.users > 0 {
            return Err(libc::EBUSY);
        }
        self.handles.remove(handle).map(|_| ()).ok_or(libc::EINVAL)
    }

    /// Counts a queue pair or a shared receive queue that is made with a handle, and returns which domain it is.
    pub(crate) fn enter(&mut self, handle: u32) -> Option<u64> {
        let handle = self.handles.get_mut(handle)?;
        handle.users += 1;
        Some(handle.domain)
    }

    pub(crate) fn leave(&mut self, handle: u32) {
        if let Some(handle) = self.handles.get_mut(handle) {
            handle.users -= 1;
        }
    }
}
