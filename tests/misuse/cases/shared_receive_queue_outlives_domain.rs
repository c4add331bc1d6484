use ibverbs::{ProtectionDomain, Result};

pub fn case(domain: ProtectionDomain<'_>) -> Result<()> {
    let queue = domain.create_srq(8, 1)?;
    drop(queue); //~ RIGHT
    drop(domain);
    drop(queue); //~ ERROR
    Ok(())
}
