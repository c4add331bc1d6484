use ibverbs::{Channel, MemoryRegion, SendWorkRequest, TransportResult};

pub fn case(channel: &mut Channel<'_>, region: &mut MemoryRegion<'_, u8>) -> TransportResult<()> {
    let mut kept = None;
    channel.manual_scope(|s| {
        kept = Some(s.post_window([SendWorkRequest::new(region.slice(..)?)])?);
        Ok(())
    })
}

fn main() {}
