use ibverbs::channel::AnyBuffer;
use ibverbs::{ChannelId, Loop, MemoryRegion, ReceiveWorkRequest, TransportResult};

pub fn case(
    server: &mut Loop<'_, AnyBuffer>,
    channel: ChannelId,
    region: Box<MemoryRegion<'_, u8>>, //~ ERROR
    region: Box<MemoryRegion<'static, u8>>, //~ RIGHT
) -> TransportResult<()> {
    Ok(server.post(channel, ReceiveWorkRequest::new(region), 1)?)
}
