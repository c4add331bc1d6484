use ibverbs::{Channel, PooledBuffer, TransportResult};

pub fn case(channel: &mut Channel<'_>, buffer: PooledBuffer) -> TransportResult<()> {
    channel.manual_scope(|s| {
        s.post_send(buffer)?.wait()?; //~ ERROR
        s.post_send(&buffer)?.wait()?; //~ RIGHT
        Ok(())
    })
}
