use ibverbs::{ProtectionDomain, Result};

pub fn case(domain: ProtectionDomain<'_>, bytes: &mut [u8]) -> Result<()> {
    let region = domain.register(bytes)?;
    drop(region);
    drop(domain);
    Ok(())
}
