use std::sync::Arc;

use ibverbs::{Channel, PreparedAsyncChannel, ProtectionDomain, Reactor};

pub fn case(
    reactor: &Reactor,
    domain: &Arc<ProtectionDomain<'static>>,
) -> Option<PreparedAsyncChannel> {
    reactor.prepare(Channel::builder(domain)).ok()
}
