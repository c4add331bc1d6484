use ibverbs::{ProtectionDomain, Result};

pub fn case(domain: ProtectionDomain<'_>, bytes: &mut [u8]) -> Result<()> {
    let _region = domain.register(bytes)?;
    drop(domain);
    Ok(())
}

fn main() {}
