use ibverbs::{Channel, PooledBuffer, TransportResult};

pub fn case(mut channel: Channel<'_>, buffer: PooledBuffer) -> TransportResult<PooledBuffer> {
    let mut work = channel.post_receive_owned(buffer)?;
    let (buffer, _) = work.wait(&mut channel)?;
    drop(channel);
    Ok(buffer)
}
