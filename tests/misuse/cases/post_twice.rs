use ibverbs::{Channel, MemoryRegion, TransportResult};

pub fn case(channel: &mut Channel<'_>, region: &mut MemoryRegion<'_, u8>) -> TransportResult<()> {
    channel.manual_scope(|s| {
        let part = region.slice_mut(..)?; //~ ERROR
        let (one, two) = (s.post_receive(part)?, s.post_receive(part)?); //~ ERROR
        let (part, other) = region.slice_mut(..)?.split_at(4)?; //~ RIGHT
        let (one, two) = (s.post_receive(part)?, s.post_receive(other)?); //~ RIGHT
        one.wait()?;
        two.wait().map(drop)
    })
}
