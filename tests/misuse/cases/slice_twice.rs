use ibverbs::{Channel, MemoryRegion, TransportResult};

pub fn case(channel: &mut Channel<'_>, region: &mut MemoryRegion<'_, u8>) -> TransportResult<()> {
    channel.manual_scope(|s| {
        let one = s.post_receive(region.slice_mut(..4)?)?; //~ ERROR
        let two = s.post_receive(region.slice_mut(4..)?)?; //~ ERROR
        let one = s.post_send(region.slice(..4)?)?; //~ RIGHT
        let two = s.post_send(region.slice(4..)?)?; //~ RIGHT
        one.wait()?;
        two.wait().map(drop)
    })
}
