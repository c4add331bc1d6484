use ibverbs::{ProtectionDomain, Result};

pub fn case(domain: ProtectionDomain<'_>) -> Result<()> {
    domain.close()?; //~ ERROR
    domain.allocate::<u8>(8).map(drop) //~ ERROR
    domain.allocate::<u8>(8).map(drop)?; //~ RIGHT
    domain.close() //~ RIGHT
}
