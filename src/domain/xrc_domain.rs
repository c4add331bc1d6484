//! XRC domains.

use std::os::fd::{AsRawFd, BorrowedFd};

use crate::debug::debug;
use crate::device::Context;
use crate::error::{Error, Result};
use crate::ffi;
use crate::handle::{Handle, object, resource};
use crate::parent::Parent;

object!(ibv_xrcd, ibv_close_xrcd);

/// `struct ibv_xrcd`: an extended reliable connection domain, whose receiving queue pairs and shared
/// receive queues work together, across processes if the domain belongs to a file.
#[doc(alias = "ibv_xrcd")]
pub struct XrcDomain<'ctx> {
    raw: Handle<ffi::ibv_xrcd>,
    context: Parent<'ctx, Context<'ctx>>,
}

resource! {
    /// `ibv_close_xrcd`: closes the domain, and returns the error if that fails, which dropping
    /// cannot.
    ///
    /// # Errors
    ///
    /// The domain is then [leaked](crate::_guide::verbs#when-a-resource-cannot-be-destroyed), with all that it was made from.
    ///
    ///  - `EBUSY`: something that was made with it still exists.
    #[doc(alias = "ibv_close_xrcd")]
    XrcDomain<'ctx>: raw of ibv_xrcd, context
}

/// Which XRC domain [`XrcDomain::open`] opens.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum XrcDomainScope<'fd> {
    /// A domain of this context alone.
    Private,
    /// The domain of the file, shared by every process that opens the file; it is created if the file
    /// has none (`O_CREAT`).
    File(BorrowedFd<'fd>),
    /// A new domain for the file, which must not have one yet (`O_CREAT | O_EXCL`).
    NewFile(BorrowedFd<'fd>),
    /// The existing domain of the file.
    ExistingFile(BorrowedFd<'fd>),
}

impl<'ctx> XrcDomain<'ctx> {
    /// `ibv_open_xrcd`: opens an XRC domain.
    ///
    /// # Errors
    ///
    ///  - `EOPNOTSUPP`, `ENOSYS`: the device does not have XRC domains.
    ///  - `EINVAL`: the file has a domain already, and a new one was asked for.
    ///  - `EAGAIN`: the file has no domain, and an existing one was asked for.
    ///  - `ENOMEM`: the device has none left.
    #[doc(alias = "ibv_open_xrcd")]
    pub fn open(
        context: impl Into<Parent<'ctx, Context<'ctx>>>,
        scope: XrcDomainScope<'_>,
    ) -> Result<Self> {
        use ffi::ibv_xrcd_init_attr_mask as mask;

        const VERB: &str = "ibv_open_xrcd";
        let context = context.into();
        let (fd, oflags) = match scope {
            XrcDomainScope::Private => (-1, libc::O_CREAT),
            XrcDomainScope::File(fd) => (fd.as_raw_fd(), libc::O_CREAT),
            XrcDomainScope::NewFile(fd) => (fd.as_raw_fd(), libc::O_CREAT | libc::O_EXCL),
            XrcDomainScope::ExistingFile(fd) => (fd.as_raw_fd(), 0),
        };
        let comp_mask = mask::IBV_XRCD_INIT_ATTR_FD | mask::IBV_XRCD_INIT_ATTR_OFLAGS;
        let mut attributes = ffi::ibv_xrcd_init_attr { comp_mask: comp_mask.0, fd, oflags };
        // SAFETY: the context is live, and so is the file; a domain that comes back is ours alone.
        let raw =
            unsafe { Handle::new(VERB, ffi::ibv_open_xrcd(context.as_raw(), &mut attributes)) };
        let raw = raw.map_err(|error| match (scope, error.errno()) {
            (XrcDomainScope::NewFile(_), errno @ libc::EINVAL) => {
                Error::with_reason(VERB, errno, "the file names an XRC domain already")
            }
            (XrcDomainScope::ExistingFile(_), errno @ libc::EAGAIN) => {
                Error::with_reason(VERB, errno, "the file names no XRC domain")
            }
            _ => error,
        })?;
        Ok(Self { raw, context })
    }

    /// Takes over a domain that was made elsewhere, such as by a C library.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the pointer is null, or it is of another context.
    ///
    /// # Safety
    ///
    /// `raw` is null or a live XRC domain, and nothing else closes it.
    pub unsafe fn from_raw(
        raw: *mut ffi::ibv_xrcd,
        context: impl Into<Parent<'ctx, Context<'ctx>>>,
    ) -> Result<Self> {
        const VERB: &str = "ibv_open_xrcd";
        let context = context.into();
        // SAFETY: the caller vouches for the pointer.
        let is_foreign = raw.is_null() || unsafe { (*raw).context } != context.as_raw();
        Error::invalid_if(is_foreign, VERB, "not an XRC domain of this context")?;
        // SAFETY: the caller hands over a live domain.
        Ok(Self { raw: unsafe { Handle::new(VERB, raw) }?, context })
    }

    /// The context that it was opened on.
    pub fn context(&self) -> &Context<'ctx> {
        &self.context
    }
}

debug! { XrcDomain<'_>, self, device: self.context.name(), .. }
