use ibverbs::memory::Reregistration;
use ibverbs::{Channel, MemoryRegion, TransportResult};

pub fn case<'a>(
    channel: &mut Channel<'_>,
    region: &mut MemoryRegion<'a, u8>,
    to: Reregistration<'a>,
) -> TransportResult<()> {
    region.rereg(to).unwrap(); //~ RIGHT
    channel.manual_scope(|s| {
        let send = s.post_send(region.slice(..)?)?;
        region.rereg(to).unwrap(); //~ ERROR
        send.wait().map(drop)
    })
}
