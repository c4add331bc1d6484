use ibverbs::{ProtectionDomain, Result};

pub fn case(domain: &ProtectionDomain<'_>, mut bytes: Vec<u8>) -> Result<()> {
    let region = domain.register(&mut bytes)?;
    assert_eq!(bytes[0], 0); //~ ERROR
    assert_eq!(region[0], 0); //~ RIGHT
    drop(region);
    Ok(())
}
