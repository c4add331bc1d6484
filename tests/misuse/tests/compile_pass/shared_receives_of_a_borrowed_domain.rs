use std::sync::Arc;

use ibverbs::{PooledBuffer, ProtectionDomain, Result, SharedReceives};

pub fn case(domain: Arc<ProtectionDomain<'static>>) -> Result<SharedReceives<PooledBuffer>> {
    SharedReceives::new(domain, 4)
}
