use ibverbs::{ProtectionDomain, Result};

pub fn case(domain: &ProtectionDomain<'_>, mut bytes: Vec<u8>) -> Result<()> {
    let region = domain.register(&mut bytes)?;
    drop(region); //~ RIGHT
    drop(bytes);
    drop(region); //~ ERROR
    Ok(())
}
