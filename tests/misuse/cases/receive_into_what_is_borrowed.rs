use ibverbs::{Channel, MemoryRegion, TransportResult};

pub fn case(channel: &mut Channel<'_>, region: &mut MemoryRegion<'_, u8>) -> TransportResult<()> {
    channel.receive(&mut region.slice_mut(..)?)?; //~ RIGHT
    let first = &region[0];
    channel.receive(&mut region.slice_mut(..)?)?; //~ ERROR
    assert_eq!(*first, 1);
    Ok(())
}
