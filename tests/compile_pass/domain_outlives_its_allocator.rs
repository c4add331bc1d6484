use std::alloc::Layout;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};

use ibverbs::{DomainAllocation, DomainAllocator, ProtectionDomain, Result};

struct Counting<'a>(&'a AtomicUsize);

// SAFETY: it leaves all memory to the provider.
unsafe impl DomainAllocator for Counting<'_> {
    fn alloc(&self, _: Layout, _: u64) -> DomainAllocation {
        self.0.fetch_add(1, Ordering::Relaxed);
        DomainAllocation::Default
    }

    unsafe fn free(&self, _: NonNull<u8>, _: u64) {}
}

pub fn case(base: &ProtectionDomain<'_>, count: AtomicUsize) -> Result<()> {
    let counting = Counting(&count);
    // SAFETY: there is no thread domain.
    let domain =
        unsafe { ProtectionDomain::parent_domain_with_allocator(base, None, counting)? };
    drop(domain);
    drop(count);
    Ok(())
}
