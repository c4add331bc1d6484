use ibverbs::{Channel, QueuePairEndpoint, TransportResult};

pub fn case(mut channel: Channel<'_>, peer: QueuePairEndpoint) -> TransportResult<()> {
    let again = channel.reset()?.handshake(peer)?;
    channel.send_inline(b"late")?;
    drop(again);
    Ok(())
}

fn main() {}
