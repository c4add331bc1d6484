use std::sync::Arc;

use ibverbs::{ProtectionDomain, Reactor, Result, SharedReceives};

pub fn case(reactor: &Reactor, domain: Arc<ProtectionDomain<'static>>) -> Result<SharedReceives> {
    reactor.add_shared_receives(domain, 4)
}
