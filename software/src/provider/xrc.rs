//! XRC domains.

use std::ffi::c_int;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{FromRawFd, OwnedFd};

use super::{object, shared, status, zeroed};
use crate::ffi::*;
use crate::transport::xrc_domains::XrcFile;

/// A bit of `enum verbs_xrcd_mask`: the structure has a handle.
const VERBS_XRCD_HANDLE: u32 = 1;

/// The engine's number for a handle of an XRC domain.
///
/// # Safety
///
/// `xrcd` is a live XRC domain of this provider.
pub(super) unsafe fn handle(xrcd: *mut ibv_xrcd) -> u32 {
    // SAFETY: the caller vouches for it; the C object is the first member of ours.
    unsafe { (*xrcd.cast::<verbs_xrcd>()).handle }
}

pub(super) unsafe extern "C" fn open_xrcd(
    context: *mut ibv_context,
    attr: *mut ibv_xrcd_init_attr,
) -> *mut ibv_xrcd {
    type M = ibv_xrcd_init_attr_mask;
    // SAFETY: as the module's parent says; the caller has the file open.
    let made = unsafe {
        let attr = &*attr;
        let needed = M::IBV_XRCD_INIT_ATTR_FD | M::IBV_XRCD_INIT_ATTR_OFLAGS;
        if attr.comp_mask & !needed.0 != 0 {
            Err(libc::EOPNOTSUPP)
        } else if attr.comp_mask != needed.0 {
            Err(libc::EINVAL)
        } else {
            file(attr.fd).and_then(|file| {
                let has = |flag| attr.oflags & flag != 0;
                let (create, exclusive) = (has(libc::O_CREAT), has(libc::O_EXCL));
                shared(context).lock().core.xrc_domains.open(file, create, exclusive)
            })
        }
    };
    object(made.map(|handle| {
        let mut xrcd = zeroed::<verbs_xrcd>();
        xrcd.xrcd.context = context;
        xrcd.comp_mask = VERBS_XRCD_HANDLE;
        xrcd.handle = handle;
        Box::into_raw(xrcd).cast()
    }))
}

/// The identity of a domain's file; `None` for -1, which names no file.
fn file(fd: c_int) -> Result<Option<XrcFile>, c_int> {
    if fd == -1 {
        return Ok(None);
    }
    let errno = || io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO);
    let mut status = MaybeUninit::<libc::stat>::uninit();
    // SAFETY: the structure is writable; the kernel checks the descriptor. The new one is ours alone.
    unsafe {
        let open = libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 0);
        if open < 0 {
            return Err(errno());
        }
        let _open = OwnedFd::from_raw_fd(open);
        if libc::fstat(open, status.as_mut_ptr()) != 0 {
            return Err(errno());
        }
        let status = status.assume_init();
        Ok(Some(XrcFile { inode: (status.st_dev, status.st_ino), _open }))
    }
}

pub(super) unsafe extern "C" fn close_xrcd(xrcd: *mut ibv_xrcd) -> c_int {
    // SAFETY: as the module's parent says; it is ours, and freed once.
    unsafe {
        let result = shared((*xrcd).context).lock().core.xrc_domains.close(handle(xrcd));
        if result.is_ok() {
            drop(Box::from_raw(xrcd.cast::<verbs_xrcd>()));
        }
        status(result)
    }
}
