use ibverbs::{Channel, MemoryRegion, TransportResult};

pub fn case(channel: &mut Channel<'_>, region: &mut MemoryRegion<'_, u8>) -> TransportResult<()> {
    let (buffer, _) = channel.manual_scope(|s| s.post_send(region.slice(..)?)?.wait())?;
    assert_eq!(buffer.len(), 8);
    Ok(())
}
