use ibverbs::{Channel, MemoryRegion, TransportResult};

pub fn case(channel: &mut Channel<'_>, region: &mut MemoryRegion<'_, u8>) -> TransportResult<()> {
    assert!(!channel.as_raw().is_null()); //~ RIGHT
    channel.manual_scope(|s| {
        assert!(!channel.as_raw().is_null()); //~ ERROR
        s.post_send(region.slice(..)?)?.wait().map(drop)
    })
}
