use ibverbs::{Channel, MemoryRegion, TransportResult};

pub fn case(channel: &mut Channel<'_>, region: &mut MemoryRegion<'_, u8>) -> TransportResult<()> {
    channel.manual_scope(|s| {
        region[0] = 1;
        let send = s.post_send(region.slice(..)?)?;
        send.wait().map(drop)
    })
}
