use std::sync::Arc; //~ RIGHT
//~ RIGHT
use ibverbs::future::PreparedAsyncChannel;
use ibverbs::{Channel, ProtectionDomain, Reactor};

pub fn case(reactor: &Reactor, domain: &ProtectionDomain<'static>) -> Option<PreparedAsyncChannel> { //~ ERROR
pub fn case( //~ RIGHT
    reactor: &Reactor, //~ RIGHT
    domain: &Arc<ProtectionDomain<'static>>, //~ RIGHT
) -> Option<PreparedAsyncChannel> { //~ RIGHT
    reactor.prepare(Channel::builder(domain)).ok()
}
