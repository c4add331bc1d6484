use ibverbs::{Channel, MemoryRegion, TransportResult};

pub fn case(channel: &mut Channel<'_>, region: &mut MemoryRegion<'_, u8>) -> TransportResult<()> {
    let mut part = region.slice_mut(..)?; //~ RIGHT
    channel.manual_scope(|s| {
        let mut part = region.slice_mut(..)?; //~ ERROR
        s.post_receive(part.reborrow())?.wait()?;
        Ok(())
    })
}
