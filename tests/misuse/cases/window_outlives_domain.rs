use ibverbs::memory::MemoryWindowType;
use ibverbs::{ProtectionDomain, Result};

pub fn case(domain: ProtectionDomain<'_>) -> Result<()> {
    let window = domain.alloc_mw(MemoryWindowType::Type1)?;
    drop(window); //~ RIGHT
    drop(domain);
    drop(window); //~ ERROR
    Ok(())
}
