use ibverbs::{Channel, MemoryRegion, TransportResult};

pub fn case(channel: &mut Channel<'_>, region: &mut MemoryRegion<'_, u8>) -> TransportResult<()> {
    channel.manual_scope(|s| {
        assert!(!channel.as_raw().is_null());
        s.post_send(region.slice(..)?)?.wait().map(drop)
    })
}

fn main() {}
