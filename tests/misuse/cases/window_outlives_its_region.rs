use ibverbs::memory::MemoryWindowType;
use ibverbs::operation::WindowBinding;
use ibverbs::{AccessFlags, ProtectionDomain, QueuePair, Result};

pub fn case(pair: &mut QueuePair<'_>, domain: &ProtectionDomain<'_>) -> Result<()> {
    let region = domain.allocate_shared::<u8>(8, AccessFlags::MW_BIND)?;
    let mut window = domain.alloc_mw(MemoryWindowType::Type1)?;
    let binding = WindowBinding::new(&region, .., AccessFlags::REMOTE_READ)?;
    unsafe { pair.post_bind_mw(&mut window, binding, 1) }?;
    drop(window); //~ RIGHT
    drop(region);
    drop(window); //~ ERROR
    Ok(())
}
