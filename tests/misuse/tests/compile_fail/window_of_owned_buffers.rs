use ibverbs::{Channel, PooledBuffer, SendWorkRequest, TransportResult};

pub fn case(channel: &mut Channel<'_>, buffers: [PooledBuffer; 2]) -> TransportResult<()> {
    channel.manual_scope(|s| {
        let [one, two] = buffers;
        s.post_window([SendWorkRequest::new(one), SendWorkRequest::new(two)])?.wait()?;
        Ok(())
    })
}

fn main() {}
