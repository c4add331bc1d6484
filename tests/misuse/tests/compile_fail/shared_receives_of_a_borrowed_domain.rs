use ibverbs::future::SharedReceives;
use ibverbs::{ProtectionDomain, Reactor, Result};

pub fn case(reactor: &Reactor, domain: &ProtectionDomain<'_>) -> Result<SharedReceives> {
    reactor.add_shared_receives(domain, 4)
}

fn main() {}
