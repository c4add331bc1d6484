use ibverbs::{Channel, MemoryRegion, TransportResult};

pub fn case(channel: &mut Channel<'_>, region: &mut MemoryRegion<'_, u8>) -> TransportResult<()> {
    let mut slice = region.slice(..)?; //~ ERROR
    let mut slice = region.slice_mut(..)?; //~ RIGHT
    channel.receive(&mut slice)?;
    Ok(())
}
