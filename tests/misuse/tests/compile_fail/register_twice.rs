use ibverbs::{ProtectionDomain, Result};

pub fn case(domain: &ProtectionDomain<'_>, bytes: &mut [u8]) -> Result<()> {
    let one = domain.register(bytes)?;
    let two = domain.register(bytes)?;
    drop((one, two));
    Ok(())
}

fn main() {}
