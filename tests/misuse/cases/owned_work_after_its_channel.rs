use ibverbs::{Channel, PooledBuffer, ReceiveWorkRequest, TransportResult};

pub fn case(mut channel: Channel<'_>, buffer: PooledBuffer) -> TransportResult<PooledBuffer> {
    let mut work = channel.post_owned(ReceiveWorkRequest::new(buffer))?;
    let (buffer, _) = work.wait(&mut channel)?; //~ RIGHT
    drop(channel);
    Ok(work.wait(&mut channel)?.0) //~ ERROR
    Ok(buffer) //~ RIGHT
}
