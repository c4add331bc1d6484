use ibverbs::{Channel, MemoryRegion, TransportResult};

pub fn case(channel: &mut Channel<'_>, region: &mut MemoryRegion<'_, u8>) -> TransportResult<()> {
    let work = channel.manual_scope(|s| s.post_send(region.slice(..)?))?; //~ ERROR
    work.wait().map(drop) //~ ERROR
    let (buffer, _) = channel.manual_scope(|s| s.post_send(region.slice(..)?)?.wait())?; //~ RIGHT
    assert_eq!(buffer.len(), 8); //~ RIGHT
    Ok(()) //~ RIGHT
}
