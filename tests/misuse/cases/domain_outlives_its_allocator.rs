use ibverbs::domain::Allocator;
use ibverbs::{ProtectionDomain, Result};

pub fn case<A>(base: &ProtectionDomain<'_>, slab: A) -> Result<()>
where
    for<'a> &'a A: Allocator,
{
    // SAFETY: there is no thread domain.
    let domain = unsafe { ProtectionDomain::parent_domain_with_allocator(base, None, &slab)? };
    drop(domain); //~ RIGHT
    drop(slab);
    drop(domain); //~ ERROR
    Ok(())
}
