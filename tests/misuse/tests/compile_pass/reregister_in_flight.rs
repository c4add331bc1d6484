use ibverbs::memory::Reregistration;
use ibverbs::{Channel, MemoryRegion, TransportResult};

pub fn case<'a>(
    channel: &mut Channel<'_>,
    region: &mut MemoryRegion<'a, u8>,
    to: Reregistration<'a>,
) -> TransportResult<()> {
    region.rereg(to).unwrap();
    channel.manual_scope(|s| {
        let send = s.post_send(region.slice(..)?)?;
        send.wait().map(drop)
    })
}
