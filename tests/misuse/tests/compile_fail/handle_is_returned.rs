use ibverbs::{Channel, MemoryRegion, TransportResult};

pub fn case(channel: &mut Channel<'_>, region: &mut MemoryRegion<'_, u8>) -> TransportResult<()> {
    let work = channel.manual_scope(|s| s.post_send(region.slice(..)?))?;
    work.wait().map(drop)
}

fn main() {}
