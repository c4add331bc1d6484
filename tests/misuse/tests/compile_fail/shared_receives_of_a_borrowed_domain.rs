use ibverbs::{PooledBuffer, ProtectionDomain, Result, SharedReceives};

pub fn case(domain: &ProtectionDomain<'_>) -> Result<SharedReceives<PooledBuffer>> {
    SharedReceives::new(domain, 4)
}

fn main() {}
