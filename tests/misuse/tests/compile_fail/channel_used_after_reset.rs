use ibverbs::{Channel, Inline, QueuePairEndpoint, TransportResult};

pub fn case(mut channel: Channel<'_>, peer: QueuePairEndpoint) -> TransportResult<()> {
    let again = channel.reset()?.handshake(peer)?;
    channel.send(Inline(b"late"))?;
    drop(again);
    Ok(())
}

fn main() {}
