use ibverbs::{Channel, MemoryRegion, TransportResult};

pub fn case(channel: &mut Channel<'_>, region: MemoryRegion<'_, u8>) -> TransportResult<()> {
    channel.manual_scope(|s| {
        s.post_send(region)?.wait()?; //~ ERROR
        s.post_send(region.slice(..)?)?.wait()?; //~ RIGHT
        Ok(())
    })
}
