//! Memory windows.
//!
//! # How a region outlives the windows bound to it
//!
//! C allows deregistering a region while a window is bound to it. That fails (rxe: `EINVAL`, others: `EBUSY`), or
//! leaves a window that leads nowhere. Both are sound: no device accesses deregistered memory, and memory whose
//! deregistration failed is leaked. To prevent the leak, a [`WindowBinding`](crate::operation::WindowBinding)
//! holds the region: borrowed while the window lives, or shared.

use std::sync::Arc;

use crate::base::{Error, Handle, Leak, Result, c_enum, debug, ffi, object, resource};
use crate::verbs::domain::{DomainRef, ProtectionDomain};

object!(ibv_mw, ibv_dealloc_mw);

c_enum! {
    /// `enum ibv_mw_type`: how a window is bound.
    #[doc(alias = "ibv_mw_type")]
    pub enum MemoryWindowType: ibv_mw_type(u32) {
        /// Any queue pair of its domain can bind it, any number of times; peers of all these queue pairs can
        /// use it.
        Type1 = IBV_MW_TYPE_1,
        /// Bound once, and again after this program or the peer (by a send) has invalidated it. On devices with
        /// type 2B, only the peer of the queue pair that bound it can use it.
        Type2 = IBV_MW_TYPE_2,
    }
}

/// `struct ibv_mw`: a memory window, through which a peer accesses a part of a region.
///
/// The rkey of a region opens all of it while it is registered. A window opens the bytes that it is bound to,
/// until it is bound to others, invalidated or deallocated. Binding is a work request
/// ([`QueuePair::post_bind_mw`](crate::QueuePair::post_bind_mw)), without a system call.
///
/// ```
/// # let rxe0 = ibverbs_software::Device::builder().name("rxe0").build().unwrap();
/// # rxe0.register();
/// # use ibverbs::memory::MemoryWindowType;
/// # use ibverbs::operation::WindowBinding;
/// # use ibverbs::{AccessFlags, QueuePair};
/// # fn grant(queue_pair: &mut QueuePair<'_>) -> ibverbs::Result<()> {
/// # let context = ibverbs::open("rxe0")?;
/// let domain = context.alloc_pd()?;
/// let region = domain.allocate_shared::<u8>(4096, AccessFlags::MW_BIND)?;
/// let mut window = domain.alloc_mw(MemoryWindowType::Type2)?;
/// let binding = WindowBinding::new(&region, 512..1024, AccessFlags::REMOTE_READ)?;
/// // SAFETY: no other request has this number.
/// let for_the_peer = unsafe { queue_pair.post_bind_mw(&mut window, binding, 1)? };
/// # Ok(())
/// # }
/// ```
///
/// Deallocate a window before destroying the queue pair that bound it: otherwise Soft-RoCE delays the
/// destruction until the window is deallocated, for almost a minute. Soft-RoCE does not confine peers to the
/// bytes of a window: it checks the access, and the bounds of the region.
#[doc(alias = "ibv_mw")]
pub struct MemoryWindow<'res> {
    raw: Handle<ffi::ibv_mw>,
    window_type: MemoryWindowType,
    // The regions of the latest two bindings: until the device has carried out the latest, the window is bound to the
    // earlier region.
    regions: [Option<Arc<dyn Leak + Send + Sync + 'res>>; 2],
    domain: DomainRef<'res>,
}

resource! {
    /// `ibv_dealloc_mw`: deallocates the window, bound or not. Unlike a drop, it returns the error.
    ///
    /// # Errors
    ///
    /// The provider's errno. The window is then
    /// [leaked](crate::_guide::verbs#when-a-resource-cannot-be-destroyed), with all that it was made from.
    #[doc(alias = "ibv_dealloc_mw")]
    MemoryWindow<'res>: raw of ibv_mw, regions, domain
}

impl<'res> MemoryWindow<'res> {
    /// `ibv_alloc_mw`: allocates a window, not yet bound.
    ///
    /// # Errors
    ///
    ///  - `EOPNOTSUPP`, `EINVAL`: the device has no windows of that type.
    ///  - `ENOMEM`: no window left on the device.
    #[doc(alias = "ibv_alloc_mw")]
    pub fn new(domain: impl Into<DomainRef<'res>>, window_type: MemoryWindowType) -> Result<Self> {
        let (domain, window_type) = (domain.into(), ffi::ibv_mw_type::from(window_type));
        // SAFETY: the domain is live; a window that comes back is ours alone.
        let raw = unsafe {
            let raw = ffi::ibv_alloc_mw(domain.as_raw(), window_type);
            Handle::new("ibv_alloc_mw", raw)
        }?;
        // Stores the type under its name, if it has one: requests for the window depend on it.
        Ok(Self { raw, window_type: window_type.into(), regions: [None, None], domain })
    }

    /// Takes over a window made elsewhere, such as by a C library.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the pointer is null, or it is of another domain.
    ///
    /// # Safety
    ///
    /// `raw` is null or a live memory window, and nothing else deallocates it. If it is bound, or a binding is
    /// outstanding, the region under it stays registered until it is bound to another one, invalidated or
    /// deallocated.
    pub unsafe fn from_raw(
        raw: *mut ffi::ibv_mw,
        domain: impl Into<DomainRef<'res>>,
    ) -> Result<Self> {
        const VERB: &str = "ibv_alloc_mw";
        let domain = domain.into();
        // SAFETY: the caller vouches for the pointer.
        let is_foreign = raw.is_null() || unsafe { (*raw).pd } != domain.as_raw();
        Error::invalid_if(is_foreign, VERB, "not a memory window of this domain")?;
        // SAFETY: the window is live.
        let window_type = unsafe { (*raw).type_ }.into();
        // SAFETY: the caller hands over a live window.
        let raw = unsafe { Handle::new(VERB, raw) }?;
        Ok(Self { raw, window_type, regions: [None, None], domain })
    }

    /// Its type.
    pub fn window_type(&self) -> MemoryWindowType {
        self.window_type
    }

    /// The key by which peers name the window, once the device has carried out the latest binding posted.
    #[inline]
    pub fn rkey(&self) -> u32 {
        // SAFETY: the window is live.
        unsafe { (*self.as_raw()).rkey }
    }

    /// Sets the key back after a posted binding has failed.
    ///
    /// Each binding takes the next key; a device binds only from the key that the window has.
    pub fn set_rkey(&mut self, rkey: u32) {
        // SAFETY: the window is live, and exclusively ours. A wrong key makes bindings fail.
        unsafe { (*self.as_raw()).rkey = rkey }
    }

    /// Releases the region of the binding before the last.
    pub(crate) fn hold(&mut self, region: Option<Arc<dyn Leak + Send + Sync + 'res>>) {
        let [latest, before] = &mut self.regions;
        *before = latest.take();
        *latest = region;
    }

    /// The domain that it is allocated in.
    pub fn protection_domain(&self) -> &ProtectionDomain<'res> {
        &self.domain
    }
}

// Without the key: a log must not give its readers access to the memory.
debug! { MemoryWindow<'_>, self, window_type: self.window_type, .. }

impl ProtectionDomain<'_> {
    /// `ibv_alloc_mw`: [`MemoryWindow::new`], borrowing this domain.
    ///
    /// To return the window from a function, call that with the domain by value or in an `Arc`.
    ///
    /// # Errors
    ///
    /// Those of [`MemoryWindow::new`].
    #[doc(alias = "ibv_alloc_mw")]
    pub fn alloc_mw(&self, window_type: MemoryWindowType) -> Result<MemoryWindow<'_>> {
        MemoryWindow::new(self, window_type)
    }
}
