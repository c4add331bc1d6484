use ibverbs::{Channel, MemoryRegion, TransportResult};

pub fn case(channel: &mut Channel<'_>, region: &mut MemoryRegion<'_, u8>) -> TransportResult<()> {
    channel.manual_scope(|s| {
        let mut send = s.post_send(region.slice(..)?)?;
        send.wait()?; //~ ERROR
        send.poll().unwrap().map(drop) //~ ERROR
        send.spin_poll()?; //~ RIGHT
        send.poll().unwrap()?; //~ RIGHT
        send.wait().map(drop) //~ RIGHT
    })
}
