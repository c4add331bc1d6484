use ibverbs::{ChannelId, Loop, PooledBuffer, ReceiveWorkRequest, TransportResult};

pub fn case(
    server: &mut Loop<'_, PooledBuffer>,
    channel: ChannelId,
    buffer: PooledBuffer,
) -> TransportResult<u8> {
    server.post(channel, ReceiveWorkRequest::new(buffer), 1)?;
    let early = buffer[0]; //~ ERROR
    server.wait_ended()?; //~ ERROR
    Ok(early) //~ ERROR
    let buffer = server.wait_ended()?.buffer; //~ RIGHT
    Ok(buffer[0]) //~ RIGHT
}
