use ibverbs::{ProtectionDomain, Result};

pub fn case(domain: ProtectionDomain<'_>) -> Result<()> {
    domain.close()?;
    domain.allocate::<u8>(8).map(drop)
}

fn main() {}
