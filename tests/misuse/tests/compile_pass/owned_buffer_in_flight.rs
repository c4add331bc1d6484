use ibverbs::{Channel, PooledBuffer, TransportResult};

pub fn case(channel: &mut Channel<'_>, buffer: PooledBuffer) -> TransportResult<u8> {
    let mut work = channel.post_receive_owned(buffer)?;
    let ended = work.wait(channel)?;
    ended.result?;
    Ok(ended.buffer[0])
}
