use ibverbs::{ProtectionDomain, Result};

pub fn case(domain: &ProtectionDomain<'_>, mut bytes: Vec<u8>) -> Result<()> {
    bytes[0] = 1; //~ RIGHT
    let region = domain.register_read_only(&bytes)?;
    bytes[0] = 1; //~ ERROR
    drop(region);
    Ok(())
}
