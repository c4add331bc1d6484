use std::ptr::{self, NonNull};

use crate::base::{Error, Leak, Result, ffi};
use crate::verbs::domain::DomainRef;

/// Holds its own domain: `rereg` may move its region to another.
#[derive(Debug)]
pub(super) struct ProviderBuffer<'pd> {
    pub(super) raw: NonNull<ffi::ibv_buf>,
    pub(super) address: *mut u8,
    domain: DomainRef<'pd>,
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

impl Drop for ProviderBuffer<'_> {
    fn drop(&mut self) {
        // SAFETY: the buffer and its domain are live, and no region of it is registered any more.
        unsafe { ffi::ibv_free_buf(self.raw.as_ptr()) }
    }
}

impl<'pd> ProviderBuffer<'pd> {
    pub(super) fn new(domain: DomainRef<'pd>, bytes: usize) -> Result<Self> {
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
}
