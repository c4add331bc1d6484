use ibverbs::{Channel, MemoryRegion, TransportResult};

pub fn case(channel: &mut Channel<'_>, region: &mut MemoryRegion<'_, u8>) -> TransportResult<()> {
    let mut slice = region.slice(..)?;
    channel.receive(&mut slice)?;
    Ok(())
}

fn main() {}
