use ibverbs::{AccessFlags, ProtectionDomain, Result};

pub fn case(domain: ProtectionDomain<'_>) -> Result<()> {
    let region = domain.allocate_shared::<u8>(8, AccessFlags::REMOTE_READ)?;
    drop(region); //~ RIGHT
    drop(domain);
    drop(region); //~ ERROR
    Ok(())
}
