use ibverbs::{ProtectionDomain, Result};

pub fn case(domain: &ProtectionDomain<'_>, mut bytes: Vec<u8>) -> Result<()> {
    let region = domain.register_read_only(&bytes)?;
    bytes[0] = 1;
    drop(region);
    Ok(())
}

fn main() {}
