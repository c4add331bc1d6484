use ibverbs::{MemoryRegion, ProtectionDomain, Result};

pub struct Server(pub MemoryRegion<'static, u8>);

pub fn case(domain: &ProtectionDomain<'static>) -> Result<Server> {
    Ok(Server(MemoryRegion::new(domain, 64)?))
}

fn main() {}
