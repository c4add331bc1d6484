use ibverbs::{Channel, MemoryRegion, TransportResult};

pub fn case(channel: &mut Channel<'_>, region: &mut MemoryRegion<'_, u8>) -> TransportResult<()> {
    channel.manual_scope(|s| {
        let one = s.post_receive(region.slice_mut(..4)?)?;
        let two = s.post_receive(region.slice_mut(4..)?)?;
        one.wait()?;
        two.wait().map(drop)
    })
}

fn main() {}
