use std::os::fd::{BorrowedFd, IntoRawFd};
use std::os::unix::fs::FileTypeExt;

use super::context::Context;
use super::{devices, fork};
use crate::error::{Error, Result};
use crate::ffi;

impl Context<'_> {
    /// `ibv_import_device`: imports a device by the [file descriptor](Context::command_fd) that another
    /// process has passed (`SCM_RIGHTS`).
    ///
    /// To use an object in both processes, make it in one, and import it in the other by the kernel's number
    /// of it: [`ProtectionDomain::import`](crate::ProtectionDomain::import),
    /// [`RawMemoryRegion::import`](crate::memory::RawMemoryRegion::import),
    /// [`DeviceMemory::import`](crate::memory::DeviceMemory::import).
    ///
    /// The caller keeps its descriptor: this duplicates it. After a failure the duplicate may stay open, as
    /// libibverbs does not report whether it closed it.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the descriptor is not a device's.
    ///  - `ENODEV`: there is no such RDMA device.
    ///  - `EOPNOTSUPP`: the device cannot be imported; in v55.0 only mlx5 can.
    ///  - `EMFILE`: the process has no descriptor left.
    ///  - `EIO`: the device is gone.
    #[doc(alias = "ibv_import_device")]
    pub fn import(command: BorrowedFd<'_>) -> Result<Context<'static>> {
        const VERB: &str = "ibv_import_device";
        let errno =
            |error: std::io::Error| Error::new(VERB, error.raw_os_error().unwrap_or(libc::EIO));
        let file = std::fs::File::from(command.try_clone_to_owned().map_err(errno)?);
        if !file.metadata().map_err(errno)?.file_type().is_char_device() {
            return Err(Error::invalid(VERB, "the file is not that of a device"));
        }
        // The verb lists the devices, and a process's first list may call `ibv_fork_init`. So list first, and open
        // without the lock.
        drop(devices());
        *fork::exclusive() = true;
        // SAFETY: the descriptor is open and given away. After a failure C may have closed it, and closing it again
        // could hit another file.
        let raw = unsafe { ffi::ibv_import_device(file.into_raw_fd()) };
        if raw.is_null() {
            return Err(Error::new(VERB, ffi::errno()));
        }
        // SAFETY: the context is live and ours alone.
        unsafe { Context::from_raw(raw) }
    }

    /// The descriptor of the kernel's verbs, which another process needs to [import](Context::import) the
    /// device.
    pub fn command_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the context is live, and keeps its descriptor open for as long.
        unsafe { BorrowedFd::borrow_raw((*self.as_raw()).cmd_fd) }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "calls libibverbs")]
    fn what_is_no_rdma_device_is_not_imported() {
        let file = std::fs::File::open("Cargo.toml").unwrap();
        let error = Context::import(file.as_fd()).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EINVAL));
        let null = std::fs::File::open("/dev/null").unwrap();
        let error = Context::import(null.as_fd()).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENODEV), "{error}");
        assert!(null.metadata().is_ok(), "it is still open");
    }
}
