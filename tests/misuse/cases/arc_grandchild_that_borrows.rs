use std::sync::Arc;

use ibverbs::{Context, MemoryRegion, ProtectionDomain, Result};

pub fn case(context: &Arc<Context<'static>>) -> Result<MemoryRegion<'static, u8>> {
    let domain = Arc::new(ProtectionDomain::new(context)?);
    domain.allocate(64) //~ ERROR
    MemoryRegion::new(domain, 64) //~ RIGHT
}
