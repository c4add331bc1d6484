//! Memory that the provider allocates.

use crate::domain::ProtectionDomain;
use crate::handle::Leak;
use crate::parent::Parent;

#[cfg(rdma_core_65)]
use {
    crate::error::{Error, Result},
    crate::ffi,
    std::ptr::{self, NonNull},
};

/// `struct ibv_buf`. It holds its domain, which may be another one than its region's after `rereg`.
#[derive(Debug)]
pub(super) struct ProviderBuffer<'pd> {
    #[cfg(rdma_core_65)]
    raw: NonNull<ffi::ibv_buf>,
    #[cfg(rdma_core_65)]
    address: *mut u8,
    domain: Parent<'pd, ProtectionDomain<'pd>>,
}

// SAFETY: libibverbs allows its functions from any thread; the address is followed as the region allows.
unsafe impl Send for ProviderBuffer<'_> {}
// SAFETY: as above.
unsafe impl Sync for ProviderBuffer<'_> {}

impl Leak for ProviderBuffer<'_> {
    fn leak(&self) {
        self.domain.leak();
    }
}

#[cfg(rdma_core_65)]
impl Drop for ProviderBuffer<'_> {
    fn drop(&mut self) {
        // SAFETY: the buffer and its domain are live, and no region of it is registered any more.
        unsafe { ffi::ibv_free_buf(self.raw.as_ptr()) }
    }
}

#[cfg(rdma_core_65)]
impl<'pd> ProviderBuffer<'pd> {
    /// `ibv_alloc_buf`: allocates zeroed bytes.
    pub(super) fn new(domain: Parent<'pd, ProtectionDomain<'pd>>, bytes: usize) -> Result<Self> {
        const VERB: &str = "ibv_alloc_buf";
        let mut raw = ptr::null_mut();
        ffi::set_errno(0);
        // SAFETY: the domain is live, and the pointer is ours.
        let address = unsafe { ffi::ibv_alloc_buf(domain.as_raw(), bytes, &mut raw) }.cast::<u8>();
        let raw = NonNull::new(raw).filter(|_| !address.is_null());
        let raw = raw.ok_or_else(|| Error::new(VERB, ffi::errno()))?;
        // SAFETY: the memory is new, and has that many bytes.
        unsafe { address.write_bytes(0, bytes) };
        Ok(Self { raw, address, domain })
    }

    pub(super) fn as_raw(&self) -> *mut ffi::ibv_buf {
        self.raw.as_ptr()
    }

    pub(super) fn address(&self) -> *mut u8 {
        self.address
    }
}
