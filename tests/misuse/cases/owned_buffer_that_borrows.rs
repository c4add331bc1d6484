use ibverbs::{Channel, MemoryRegion, ReceiveWorkRequest, TransportResult};

pub fn case(channel: &mut Channel<'_>, region: Box<MemoryRegion<'_, u8>>) -> TransportResult<()> { //~ ERROR
pub fn case( //~ RIGHT
    channel: &mut Channel<'_>, //~ RIGHT
    region: Box<MemoryRegion<'static, u8>>, //~ RIGHT
) -> TransportResult<()> { //~ RIGHT
    let mut work = channel.post_owned(ReceiveWorkRequest::new(region))?;
    Ok(work.wait(channel).map(drop)?)
}
