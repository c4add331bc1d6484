use std::sync::Arc; //~ RIGHT
//~ RIGHT
use ibverbs::future::SharedReceives;
use ibverbs::{ProtectionDomain, Reactor, Result};

pub fn case(reactor: &Reactor, domain: &ProtectionDomain<'_>) -> Result<SharedReceives> { //~ ERROR
pub fn case(reactor: &Reactor, domain: Arc<ProtectionDomain<'static>>) -> Result<SharedReceives> { //~ RIGHT
    reactor.add_shared_receives(domain, 4)
}
