use ibverbs::{Channel, PooledBuffer, TransportResult};

pub fn case(mut channel: Channel<'_>, buffer: PooledBuffer) -> TransportResult<PooledBuffer> {
    let mut work = channel.post_receive_owned(buffer)?;
    drop(channel);
    Ok(work.wait(&mut channel)?.0)
}

fn main() {}
