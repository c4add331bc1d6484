use ibverbs::future::PreparedAsyncChannel;
use ibverbs::{Channel, ProtectionDomain, Reactor};

pub fn case(reactor: &Reactor, domain: &ProtectionDomain<'static>) -> Option<PreparedAsyncChannel> {
    reactor.prepare(Channel::builder(domain)).ok()
}

fn main() {}
