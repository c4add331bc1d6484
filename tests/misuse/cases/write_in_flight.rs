use ibverbs::{Channel, MemoryRegion, TransportResult};

pub fn case(channel: &mut Channel<'_>, region: &mut MemoryRegion<'_, u8>) -> TransportResult<()> {
    channel.manual_scope(|s| {
        region[0] = 1; //~ RIGHT
        let send = s.post_send(region.slice(..)?)?;
        region[0] = 1; //~ ERROR
        send.wait().map(drop)
    })
}
