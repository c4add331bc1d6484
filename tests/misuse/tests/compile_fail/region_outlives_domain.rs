use ibverbs::{ProtectionDomain, Result};

pub fn case(domain: ProtectionDomain<'_>) -> Result<()> {
    let region = domain.allocate::<u8>(8)?;
    drop(domain);
    drop(region);
    Ok(())
}

fn main() {}
