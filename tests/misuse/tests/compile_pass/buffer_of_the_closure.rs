use ibverbs::{Channel, MemoryRegion, TransportResult};

pub fn case(channel: &mut Channel<'_>, region: &mut MemoryRegion<'_, u8>) -> TransportResult<()> {
    let local = region.protection_domain().allocate::<u8>(8)?;
    channel.manual_scope(|s| {
        s.post_send(local.slice(..)?)?.wait()?;
        Ok(())
    })
}
