use ibverbs::{AsyncChannel, PooledBuffer};

pub async fn case(channel: &AsyncChannel, buffer: PooledBuffer) -> u8 {
    let sending = channel.send(buffer);
    let early = buffer[0]; //~ ERROR
    sending.await.map_or(0, |_| early) //~ ERROR
    sending.await.map_or(0, |(buffer, _)| buffer[0]) //~ RIGHT
}
