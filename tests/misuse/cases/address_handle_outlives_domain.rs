use ibverbs::{ProtectionDomain, Result, queue_pair::AddressVector};

pub fn case(domain: ProtectionDomain<'_>, path: &AddressVector) -> Result<()> {
    let handle = domain.create_ah(path)?;
    drop(handle); //~ RIGHT
    drop(domain);
    drop(handle); //~ ERROR
    Ok(())
}
