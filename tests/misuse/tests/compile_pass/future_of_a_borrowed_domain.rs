use std::sync::Arc;

use ibverbs::future::PreparedAsyncChannel;
use ibverbs::{Channel, ProtectionDomain, Reactor};

pub fn case(
    reactor: &Reactor,
    domain: &Arc<ProtectionDomain<'static>>,
) -> Option<PreparedAsyncChannel> {
    reactor.prepare(Channel::builder(domain)).ok()
}
