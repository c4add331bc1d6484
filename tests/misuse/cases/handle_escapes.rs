use ibverbs::{Channel, MemoryRegion, TransportResult};

pub fn case(channel: &mut Channel<'_>, region: &mut MemoryRegion<'_, u8>) -> TransportResult<()> {
    let mut kept = None;
    channel.manual_scope(|s| {
        kept = Some(s.post_send(region.slice(..)?)?); //~ ERROR
        kept = Some(s.post_send(region.slice(..)?)?.wait()?); //~ RIGHT
        Ok(())
    })
}
