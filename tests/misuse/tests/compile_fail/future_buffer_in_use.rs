use ibverbs::{AsyncChannel, PooledBuffer};

pub async fn case(channel: &AsyncChannel, buffer: PooledBuffer) -> u8 {
    let sending = channel.send(buffer);
    let early = buffer[0];
    sending.await.map_or(0, |_| early)
}

fn main() {}
