use ibverbs::{ProtectionDomain, Result};

pub fn case(domain: ProtectionDomain<'_>, bytes: &mut [u8]) -> Result<()> {
    let _region = domain.register(bytes)?; //~ ERROR
    let region = domain.register(bytes)?; //~ RIGHT
    drop(region); //~ RIGHT
    drop(domain);
    Ok(())
}
