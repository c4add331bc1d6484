//! Thread domains, which take effect through parent domains.

use crate::debug::debug;
use crate::device::Context;
use crate::error::{Error, Result};
use crate::ffi;
use crate::handle::{Handle, object, resource};
use crate::parent::Parent;

object!(ibv_td, ibv_dealloc_td);

/// `struct ibv_td`: a promise that one thread at a time uses the objects created with it, so that the
/// provider need not lock.
///
/// It takes effect through
/// [`ProtectionDomain::parent_domain`](crate::ProtectionDomain::parent_domain).
#[doc(alias = "ibv_td")]
pub struct ThreadDomain<'ctx> {
    raw: Handle<ffi::ibv_td>,
    context: Parent<'ctx, Context<'ctx>>,
}

resource! {
    /// `ibv_dealloc_td`: deallocates the domain, and returns the error if that fails, which
    /// dropping cannot.
    ///
    /// # Errors
    ///
    /// The domain is then [leaked](crate::_guide::verbs#when-a-resource-cannot-be-destroyed), with all that it was made from.
    ///
    ///  - `EBUSY`: something that was made with it still exists.
    #[doc(alias = "ibv_dealloc_td")]
    ThreadDomain<'ctx>: raw of ibv_td, context
}

// Threads may share it: what the promise is about, creating objects with it, is `unsafe`.

impl<'ctx> ThreadDomain<'ctx> {
    /// `ibv_alloc_td`: allocates a thread domain.
    ///
    /// # Errors
    ///
    ///  - `EOPNOTSUPP`: the device does not have thread domains.
    ///  - `ENOMEM`: out of memory.
    #[doc(alias = "ibv_alloc_td")]
    pub fn new(context: impl Into<Parent<'ctx, Context<'ctx>>>) -> Result<Self> {
        let context = context.into();
        let mut attributes = ffi::ibv_td_init_attr::default();
        // SAFETY: the context is live; a domain that comes back is ours alone.
        let raw = unsafe {
            let raw = ffi::ibv_alloc_td(context.as_raw(), &mut attributes);
            Handle::new("ibv_alloc_td", raw)
        }?;
        Ok(Self { raw, context })
    }

    /// Takes over a thread domain that was made elsewhere, such as by a C library.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the pointer is null, or it is of another context.
    ///
    /// # Safety
    ///
    /// `raw` is null or a live thread domain, and nothing else deallocates it. The objects made with it
    /// are used as [`ProtectionDomain::parent_domain`](crate::ProtectionDomain::parent_domain) demands.
    pub unsafe fn from_raw(
        raw: *mut ffi::ibv_td,
        context: impl Into<Parent<'ctx, Context<'ctx>>>,
    ) -> Result<Self> {
        const VERB: &str = "ibv_alloc_td";
        let context = context.into();
        // SAFETY: the caller vouches for the pointer.
        let is_foreign = raw.is_null() || unsafe { (*raw).context } != context.as_raw();
        Error::invalid_if(is_foreign, VERB, "not a thread domain of this context")?;
        // SAFETY: the caller hands over a live domain.
        Ok(Self { raw: unsafe { Handle::new(VERB, raw) }?, context })
    }

    /// The context that it was allocated from.
    pub fn context(&self) -> &Context<'ctx> {
        &self.context
    }
}

debug! { ThreadDomain<'_>, self, device: self.context.name(), .. }
