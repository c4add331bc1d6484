use ibverbs::{Channel, MemoryRegion, TransportResult};

pub fn case(channel: &mut Channel<'_>, region: &mut MemoryRegion<'_, u8>) -> TransportResult<()> {
    channel.manual_scope(|s| {
        let receive = s.post_receive(region.slice_mut(..)?)?;
        s.post_send(region.slice(..)?)?.wait()?; //~ ERROR
        receive.wait().map(drop) //~ ERROR
        let (received, _) = receive.wait()?; //~ RIGHT
        s.post_send(received)?.wait().map(drop) //~ RIGHT
    })
}
