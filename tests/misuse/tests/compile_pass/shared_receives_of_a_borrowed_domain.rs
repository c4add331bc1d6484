use std::sync::Arc;

use ibverbs::future::SharedReceives;
use ibverbs::{ProtectionDomain, Reactor, Result};

pub fn case(reactor: &Reactor, domain: Arc<ProtectionDomain<'static>>) -> Result<SharedReceives> {
    reactor.add_shared_receives(domain, 4)
}
