use ibverbs::channel::ChannelSet;
use ibverbs::{MemoryRegion, TransportResult};

pub fn case(set: &mut ChannelSet<'_>, region: &mut MemoryRegion<'_, u8>) -> TransportResult<()> {
    let mut kept = None; //~ ERROR
    let ended = set.scope(None, |s| {
        kept = s.peer(0); //~ ERROR
        let _kept = s.peer(0); //~ RIGHT
        s.peers()[1].post_send(region.slice(..)?)?.wait().map(drop)
    });
    ended.map(drop)
}
