use ibverbs::{ProtectionDomain, Result};

pub fn case(domain: ProtectionDomain<'_>) -> Result<()> {
    domain.allocate::<u8>(8).map(drop)?;
    domain.close()
}
