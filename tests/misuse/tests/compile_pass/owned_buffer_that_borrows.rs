use ibverbs::{Channel, MemoryRegion, ReceiveWorkRequest, TransportResult};

pub fn case(
    channel: &mut Channel<'_>,
    region: Box<MemoryRegion<'static, u8>>,
) -> TransportResult<()> {
    let mut work = channel.post_owned(ReceiveWorkRequest::new(region))?;
    Ok(work.wait(channel).map(drop)?)
}
