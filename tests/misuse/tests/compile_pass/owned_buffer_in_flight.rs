use ibverbs::{Channel, PooledBuffer, ReceiveWorkRequest, TransportResult};

pub fn case(channel: &mut Channel<'_>, buffer: PooledBuffer) -> TransportResult<u8> {
    let mut work = channel.post_owned(ReceiveWorkRequest::new(buffer))?;
    let (buffer, _) = work.wait(channel)?;
    Ok(buffer[0])
}
