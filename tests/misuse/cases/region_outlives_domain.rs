use ibverbs::{ProtectionDomain, Result};

pub fn case(domain: ProtectionDomain<'_>) -> Result<()> {
    let region = domain.allocate::<u8>(8)?;
    drop(region); //~ RIGHT
    drop(domain);
    drop(region); //~ ERROR
    Ok(())
}
