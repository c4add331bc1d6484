use ibverbs::{Channel, MemoryRegion, TransportResult};

pub fn case(channel: &mut Channel<'_>, region: &mut MemoryRegion<'_, u8>) -> TransportResult<()> {
    channel.manual_scope(|s| {
        let mut send = s.post_send(region.slice(..)?)?;
        send.spin_poll()?;
        send.poll().unwrap()?;
        send.wait().map(drop)
    })
}
