use ibverbs::{Channel, MemoryRegion, TransportResult};

pub fn case(channel: &mut Channel<'_>, region: &mut MemoryRegion<'_, u8>) -> TransportResult<()> {
    channel.manual_scope(|s| {
        let part = region.slice_mut(..)?;
        let (one, two) = (s.post_receive(part)?, s.post_receive(part)?);
        one.wait()?;
        two.wait().map(drop)
    })
}

fn main() {}
