use std::os::fd::{AsRawFd, BorrowedFd};

use super::allocator::{Allocator, Registered, ThreadDomain};
use crate::base::{Error, Handle, Leak, Parent, Result, debug, ffi, getters, object, resource};
use crate::verbs::device::{Context, ContextRef};

object!(ibv_pd, ibv_dealloc_pd or ibv_unimport_pd);

/// What is made from a protection domain borrows or shares it.
pub(crate) type DomainRef<'ctx> = Parent<'ctx, ProtectionDomain<'ctx>>;

/// `struct ibv_pd`: a protection domain. Memory, queue pairs and address handles work together only within one domain.
pub struct ProtectionDomain<'ctx> {
    raw: Handle<ffi::ibv_pd>,
    base: Option<Base<'ctx>>,
    context: ContextRef<'ctx>,
}

resource! {
    /// `ibv_dealloc_pd`: deallocates the domain and reports a failure, which a drop ignores.
    ///
    /// # Errors
    ///
    /// The domain is then [leaked](crate::_guide::verbs#when-a-resource-cannot-be-destroyed), with its parents.
    ///
    ///  - `EBUSY`: a leaked object uses it.
    #[doc(alias = "ibv_dealloc_pd")]
    ProtectionDomain<'ctx>: raw of ibv_pd, base, context
}

/// The parents, which must outlive the parent domain.
struct Base<'ctx> {
    domain: DomainRef<'ctx>,
    thread: Option<Parent<'ctx, ThreadDomain<'ctx>>>,
    allocator: Option<Registered<'ctx>>,
}

impl Leak for Base<'_> {
    fn leak(&self) {
        self.domain.leak();
        self.thread.leak();
        self.allocator.leak();
    }
}

impl<'ctx> ProtectionDomain<'ctx> {
    /// `ibv_alloc_pd`: allocates a protection domain.
    ///
    /// # Errors
    ///
    ///  - `ENOMEM`: the device or the machine has none left.
    #[doc(alias = "ibv_alloc_pd")]
    pub fn new(context: impl Into<ContextRef<'ctx>>) -> Result<Self> {
        let context = context.into();
        // SAFETY: the context is live; a domain that comes back is ours alone.
        let raw = unsafe { Handle::new("ibv_alloc_pd", ffi::ibv_alloc_pd(context.as_raw())) }?;
        Ok(Self { raw, base: None, context })
    }

    /// `ibv_alloc_parent_domain`: allocates a domain that stands for `base`: objects of both work together. A thread
    /// domain applies to objects created with the new domain.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the thread domain belongs to another context.
    ///  - `EOPNOTSUPP`: the device has no parent domains.
    ///  - `ENOMEM`: out of memory.
    ///
    /// # Safety
    ///
    /// With a thread domain, only one thread at a time uses the objects, including completion queues, that are created
    /// with the new domain or another one of that thread domain, although their types are `Sync`. A
    /// `LoopSender` uses the queue pair of its channel.
    #[doc(alias = "ibv_alloc_parent_domain")]
    pub unsafe fn parent_domain(
        base: impl Into<DomainRef<'ctx>>,
        thread: Option<Parent<'ctx, ThreadDomain<'ctx>>>,
    ) -> Result<Self> {
        // SAFETY: the caller vouches for the use of the thread domain.
        unsafe { Self::stand_for(base.into(), thread, None) }
    }

    /// `ibv_alloc_parent_domain`: as [`parent_domain`](Self::parent_domain), with an `allocator` for the queues of
    /// objects created with the new domain: in huge pages, or on a certain node. Of rdma-core's providers, only mlx5
    /// calls it.
    ///
    /// # Errors
    ///
    /// Those of [`parent_domain`](Self::parent_domain), and `EOPNOTSUPP` or `EINVAL`: the device takes no allocators.
    ///
    /// # Safety
    ///
    /// That of [`parent_domain`](Self::parent_domain).
    pub unsafe fn parent_domain_with_allocator(
        base: impl Into<DomainRef<'ctx>>,
        thread: Option<Parent<'ctx, ThreadDomain<'ctx>>>,
        allocator: impl Allocator + 'ctx,
    ) -> Result<Self> {
        // SAFETY: the caller vouches for the use of the thread domain.
        unsafe { Self::stand_for(base.into(), thread, Some(Registered::new(allocator))) }
    }

    /// # Safety
    ///
    /// That of [`parent_domain`](Self::parent_domain).
    unsafe fn stand_for(
        domain: DomainRef<'ctx>,
        thread: Option<Parent<'ctx, ThreadDomain<'ctx>>>,
        allocator: Option<Registered<'ctx>>,
    ) -> Result<Self> {
        const VERB: &str = "ibv_alloc_parent_domain";
        let context = domain.context.clone();
        let mut attributes =
            ffi::ibv_parent_domain_init_attr { pd: domain.as_raw(), ..Default::default() };
        if let Some(thread) = &thread {
            let reason = "the thread domain belongs to another context";
            context.check_same(thread.context(), VERB, reason)?;
            attributes.td = thread.as_raw();
        }
        if let Some(allocator) = &allocator {
            allocator.register(&mut attributes);
        }
        // SAFETY: context and domains are live, and kept by the new domain, which is ours alone.
        let raw = unsafe {
            let raw = ffi::ibv_alloc_parent_domain(context.as_raw(), &mut attributes);
            Handle::new(VERB, raw)
        }?;
        let base = Some(Base { domain, thread, allocator });
        Ok(Self { raw, base, context })
    }

    /// Takes over a protection domain that other code allocated.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the pointer is null, or the domain belongs to another context.
    ///
    /// # Safety
    ///
    /// `raw` is null or a live protection domain that nothing else deallocates. If it is a parent domain, the domain
    /// that it stands for outlives it, and with a thread domain the condition of [`parent_domain`](Self::parent_domain)
    /// holds.
    pub unsafe fn from_raw(
        raw: *mut ffi::ibv_pd,
        context: impl Into<ContextRef<'ctx>>,
    ) -> Result<Self> {
        let context = context.into();
        // SAFETY: the caller vouches for the pointer.
        let is_foreign = raw.is_null() || unsafe { (*raw).context } != context.as_raw();
        Error::invalid_if(is_foreign, "ibv_alloc_pd", "not a protection domain of this context")?;
        // SAFETY: the caller hands over a live domain.
        let raw = unsafe { Handle::new("ibv_alloc_pd", raw) }?;
        Ok(Self { raw, base: None, context })
    }

    /// The domain that a parent domain stands for.
    pub fn base(&self) -> Option<&ProtectionDomain<'ctx>> {
        self.base.as_ref().map(|base| &*base.domain)
    }

    /// `ibv_import_pd`: imports a domain that another process allocated through the same file descriptor of the device,
    /// by its [number](Self::handle). The objects of both processes in it work together.
    ///
    /// A drop or `close` undoes the import (`ibv_unimport_pd`), and keeps the domain. One process calls
    /// [`own`](Self::own), and deallocates the domain when the others no longer use it.
    ///
    /// # Errors
    ///
    ///  - `EOPNOTSUPP`: the device cannot import.
    ///  - `ENOMEM`: out of memory.
    ///
    /// Only the first use of the domain reports a wrong number.
    #[doc(alias = "ibv_import_pd")]
    #[doc(alias = "ibv_unimport_pd")]
    pub fn import(context: impl Into<ContextRef<'ctx>>, handle: u32) -> Result<Self> {
        let context = context.into();
        // SAFETY: the context is live; what comes back is an import of ours.
        let raw = unsafe {
            Handle::import("ibv_import_pd", ffi::ibv_import_pd(context.as_raw(), handle))
        }?;
        Ok(Self { raw, base: None, context })
    }

    /// Takes ownership of an [imported](Self::import) domain: a drop or `close` then deallocates it, for all processes.
    pub fn own(&mut self) {
        self.raw.own();
    }

    /// The kernel's number of the domain, for [`import`](Self::import) in a process that shares the device's file
    /// descriptor.
    pub fn handle(&self) -> u32 {
        // SAFETY: the domain is live.
        unsafe { (*self.as_raw()).handle }
    }

    getters! { self,
        /// The context that it was allocated from.
        context: &Context<'ctx> => &self.context;

        /// The context, as the parent of another object: `CompletionQueue::new(domain.context_parent(), 64)` owns or
        /// shares it as this domain does.
        context_parent: ContextRef<'ctx> => self.context.clone();
    }
}

impl Context<'_> {
    /// `ibv_alloc_pd`: [`ProtectionDomain::new`], borrowing this context.
    ///
    /// For a domain that leaves the function, pass `new` the context by value or in an `Arc`.
    ///
    /// # Errors
    ///
    /// Those of [`ProtectionDomain::new`].
    #[doc(alias = "ibv_alloc_pd")]
    pub fn alloc_pd(&self) -> Result<ProtectionDomain<'_>> {
        ProtectionDomain::new(self)
    }
}

debug! { ProtectionDomain<'_>, self, device: self.context.name(), .. }

object!(ibv_xrcd, ibv_close_xrcd);

/// `struct ibv_xrcd`: an XRC (extended reliable connection) domain. Its receiving queue pairs and shared receive queues
/// work together, across processes if it belongs to a file.
#[doc(alias = "ibv_xrcd")]
pub struct XrcDomain<'ctx> {
    raw: Handle<ffi::ibv_xrcd>,
    context: ContextRef<'ctx>,
}

resource! {
    /// `ibv_close_xrcd`: closes the domain and reports a failure, which a drop ignores.
    ///
    /// # Errors
    ///
    /// The domain is then [leaked](crate::_guide::verbs#when-a-resource-cannot-be-destroyed), with its context.
    ///
    ///  - `EBUSY`: an object still uses it.
    #[doc(alias = "ibv_close_xrcd")]
    XrcDomain<'ctx>: raw of ibv_xrcd, context
}

/// The domain that [`XrcDomain::open`] opens.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum XrcDomainScope<'fd> {
    /// A domain of this context alone.
    Private,
    /// The file's domain, shared by all processes that open the file, and created if missing (`O_CREAT`).
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
    ///  - `EOPNOTSUPP`, `ENOSYS`: the device has no XRC domains.
    ///  - `EINVAL`: [`NewFile`](XrcDomainScope::NewFile), but the file has a domain.
    ///  - `EAGAIN`: [`ExistingFile`](XrcDomainScope::ExistingFile), but the file has none.
    ///  - `ENOMEM`: the device has none left.
    #[doc(alias = "ibv_open_xrcd")]
    pub fn open(context: impl Into<ContextRef<'ctx>>, scope: XrcDomainScope<'_>) -> Result<Self> {
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

    /// Takes over a domain that other code opened, such as a C library.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the pointer is null, or of another context.
    ///
    /// # Safety
    ///
    /// `raw` is null or a live XRC domain that nothing else closes.
    pub unsafe fn from_raw(
        raw: *mut ffi::ibv_xrcd,
        context: impl Into<ContextRef<'ctx>>,
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
