use ibverbs::{Channel, MemoryRegion, TransportResult};

pub fn case(channel: &mut Channel<'_>, region: &mut MemoryRegion<'_, u8>) -> TransportResult<()> {
    channel.receive(region.slice(..)?).map(drop) //~ ERROR
    channel.receive(region.slice_mut(..)?).map(drop) //~ RIGHT
}
