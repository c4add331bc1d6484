//! Memory that this crate allocates, registers and frees.

use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;

use super::access::AccessFlags;
use super::allocation::Allocation;
use super::options::RegionOptions;
use super::region_buffer::RegionBuffer;
use super::registration::{self, ReregisterError, Reregistration};
use super::scatter_gather::Element;
use crate::domain::ProtectionDomain;
use crate::error::Result;
use crate::ffi;
use crate::handle::{Handle, Leak};
use crate::parent::Parent;

/// Zeroed, registered memory for `len` elements, owned.
///
/// The memory is freed only after the region was deregistered; if that fails, it is leaked, since
/// the device might still use it.
#[derive(Debug)]
pub(super) struct RegisteredBuffer<'pd, T> {
    region: Handle<ffi::ibv_mr>,
    memory: ManuallyDrop<Allocation>,
    len: usize,
    base: u64,
    access: AccessFlags,
    domain: Parent<'pd, ProtectionDomain<'pd>>,
    elements: PhantomData<T>,
}

impl<T> Drop for RegisteredBuffer<'_, T> {
    fn drop(&mut self) {
        let _ = self.destroy();
    }
}

impl<T> Leak for RegisteredBuffer<'_, T> {
    fn leak(&self) {
        self.region.leak();
        self.domain.leak();
    }
}

impl<T> RegisteredBuffer<'_, T> {
    /// Deregisters the memory and frees it. If that fails, both are leaked, and the domain with them.
    fn destroy(&mut self) -> Result<()> {
        if self.region.is_gone() {
            return Ok(());
        }
        self.region.destroy().inspect_err(|_| self.domain.leak())?;
        // SAFETY: the device no longer knows the memory, and nobody can borrow it any more. This code
        // is reached once: after it the region is gone.
        unsafe { ManuallyDrop::drop(&mut self.memory) };
        Ok(())
    }
}

// SAFETY: the buffer owns its memory, whose elements are `Send`; libibverbs deregisters from any
// thread.
unsafe impl<T: Send> Send for RegisteredBuffer<'_, T> {}
// SAFETY: a shared reference gives out at most shared references to elements, which are `Sync`, or
// copies elements by atomic accesses.
unsafe impl<T: Sync> Sync for RegisteredBuffer<'_, T> {}

impl<'pd, T: Element> RegisteredBuffer<'pd, T> {
    /// Allocates `len` zeroed elements and registers them.
    pub(super) fn new(
        domain: Parent<'pd, ProtectionDomain<'pd>>,
        len: usize,
        options: RegionOptions,
    ) -> Result<Self> {
        const VERB: &str = "ibv_reg_mr";
        let (memory, bytes, base, access) = options.allocate::<T>(VERB, &domain, len)?;
        let address = memory.data().as_ptr();
        // SAFETY: the memory is ours and of this length until the region is deregistered. Its elements
        // accept any bytes that the device writes, and `MemoryRegion` and `SharedMemoryRegion` ensure
        // that nobody holds a reference to memory that a peer may write.
        let region =
            unsafe { registration::register(VERB, &domain, address, bytes, base, access) }?;
        Ok(Self {
            region,
            memory: ManuallyDrop::new(memory),
            len,
            base,
            access,
            domain,
            elements: PhantomData,
        })
    }

    /// Deregisters the memory and frees it, or returns the error that prevented it.
    pub(super) fn close(mut self) -> Result<()> {
        self.destroy()
    }

    /// Deregisters the memory and returns it. If that fails, both are leaked.
    pub(super) fn into_inner(mut self) -> Result<RegionBuffer<T>> {
        self.region.destroy().inspect_err(|_| self.domain.leak())?;
        // SAFETY: taken once, since the region is gone from now on, and `drop` does nothing then.
        let memory = unsafe { ManuallyDrop::take(&mut self.memory) };
        Ok(RegionBuffer::new(memory, self.len))
    }

    /// Changes access or domain. The caller ensures that the access is right for its kind of region.
    pub(super) fn rereg(&mut self, change: Reregistration<'pd>) -> Result<(), ReregisterError> {
        // SAFETY: the memory stays ours, and is freed only after the region was deregistered. The two
        // kinds of region check the access, as in `new`.
        unsafe {
            let Self { region, domain, access, .. } = self;
            registration::reregister(region, domain, access, change, None)
        }
    }

    pub(super) fn as_raw(&self) -> *mut ffi::ibv_mr {
        self.region.as_ptr()
    }

    /// Its memory, which is aligned for `T`.
    #[inline]
    pub(super) fn data(&self) -> NonNull<T> {
        self.memory.data().cast()
    }

    /// The number of elements.
    #[inline]
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// The address by which requests name its first byte.
    #[inline]
    pub(super) fn base(&self) -> u64 {
        self.base
    }

    pub(crate) fn access(&self) -> AccessFlags {
        self.access
    }

    pub(super) fn domain(&self) -> &ProtectionDomain<'pd> {
        &self.domain
    }
}
