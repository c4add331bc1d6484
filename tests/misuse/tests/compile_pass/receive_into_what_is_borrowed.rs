use ibverbs::{Channel, MemoryRegion, TransportResult};

pub fn case(channel: &mut Channel<'_>, region: &mut MemoryRegion<'_, u8>) -> TransportResult<()> {
    channel.receive(&mut region.slice_mut(..)?)?;
    let first = &region[0];
    assert_eq!(*first, 1);
    Ok(())
}
