use ibverbs::{Channel, MemoryRegion, TransportResult};

pub fn case(channel: &mut Channel<'_>, region: &mut MemoryRegion<'_, u8>) -> TransportResult<()> {
    let domain = region.protection_domain(); //~ ERROR
    let local = region.protection_domain().allocate::<u8>(8)?; //~ RIGHT
    channel.manual_scope(|s| {
        let local = domain.allocate::<u8>(8)?; //~ ERROR
        s.post_send(local.slice(..)?)?.wait()?;
        Ok(())
    })
}
