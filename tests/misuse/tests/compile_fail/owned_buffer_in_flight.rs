use ibverbs::{Channel, PooledBuffer, TransportResult};

pub fn case(channel: &mut Channel<'_>, buffer: PooledBuffer) -> TransportResult<u8> {
    let mut work = channel.post_receive_owned(buffer)?;
    let early = buffer[0];
    work.wait(channel)?;
    Ok(early)
}

fn main() {}
