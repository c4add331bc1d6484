use ibverbs::{Channel, PooledBuffer, ReceiveWorkRequest, TransportResult};

pub fn case(channel: &mut Channel<'_>, buffer: PooledBuffer) -> TransportResult<u8> {
    let mut work = channel.post_owned(ReceiveWorkRequest::new(buffer))?;
    let early = buffer[0]; //~ ERROR
    work.wait(channel)?; //~ ERROR
    Ok(early) //~ ERROR
    let (buffer, _) = work.wait(channel)?; //~ RIGHT
    Ok(buffer[0]) //~ RIGHT
}
