use ibverbs::{Channel, MemoryRegion, TransportResult};

pub fn case<'a>(
    channel: &mut Channel<'_>,
    [one, two]: &mut [MemoryRegion<'a, u8>; 2],
) -> TransportResult<()> {
    channel.manual_scope(|s| {
        std::mem::swap(one, two); //~ RIGHT
        let receive = s.post_receive(one.slice_mut(..)?)?;
        std::mem::swap(one, two); //~ ERROR
        receive.wait().map(drop)
    })
}
