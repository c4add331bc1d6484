use ibverbs::{AsyncChannel, PooledBuffer};

pub async fn case(channel: &AsyncChannel, buffer: PooledBuffer) -> u8 {
    let sending = channel.send(buffer);
    sending.await.map_or(0, |(buffer, _)| buffer[0])
}
