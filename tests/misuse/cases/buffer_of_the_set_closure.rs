use ibverbs::channel::ChannelSet;
use ibverbs::{MemoryRegion, TransportResult};

pub fn case(set: &mut ChannelSet<'_>, region: &mut MemoryRegion<'_, u8>) -> TransportResult<()> {
    let domain = region.protection_domain();
    let local = domain.allocate::<u8>(8)?; //~ RIGHT
    let ended = set.scope(None, |s| {
        let local = domain.allocate::<u8>(8)?; //~ ERROR
        s.peers()[0].post_send(local.slice(..)?)?.wait().map(drop)
    });
    ended.map(drop)
}
