use ibverbs::{AddressVector, ProtectionDomain, Result};

pub fn case(domain: ProtectionDomain<'_>, path: &AddressVector) -> Result<()> {
    let handle = domain.create_ah(path)?;
    drop(handle); //~ RIGHT
    drop(domain);
    drop(handle); //~ ERROR
    Ok(())
}
