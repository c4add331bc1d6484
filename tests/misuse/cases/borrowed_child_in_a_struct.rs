use ibverbs::{MemoryRegion, ProtectionDomain, Result};

pub struct Server(pub MemoryRegion<'static, u8>);

pub fn case(domain: &ProtectionDomain<'static>) -> Result<Server> { //~ ERROR
pub fn case(domain: &std::sync::Arc<ProtectionDomain<'static>>) -> Result<Server> { //~ RIGHT
    Ok(Server(MemoryRegion::new(domain, 64)?))
}
