use ibverbs::channel::ChannelSet;
use ibverbs::{MemoryRegion, TransportResult};

pub fn case(set: &mut ChannelSet<'_>, region: &mut MemoryRegion<'_, u8>) -> TransportResult<()> {
    let ended = set.scope(None, |s| {
        let _kept = s.peer(0);
        s.peers()[1].post_send(region.slice(..)?)?.wait().map(drop)
    });
    ended.map(drop)
}
