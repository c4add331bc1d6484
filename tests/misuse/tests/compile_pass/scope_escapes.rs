use ibverbs::{Channel, MemoryRegion, TransportResult};

pub fn case(channel: &mut Channel<'_>, region: &mut MemoryRegion<'_, u8>) -> TransportResult<()> {
    channel.manual_scope(|s| {
        let kept = s;
        kept.post_send(region.slice(..)?)?.wait().map(drop)
    })
}
