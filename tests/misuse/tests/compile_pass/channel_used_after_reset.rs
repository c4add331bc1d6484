use ibverbs::{Channel, Inline, QueuePairEndpoint, TransportResult};

pub fn case(mut channel: Channel<'_>, peer: QueuePairEndpoint) -> TransportResult<()> {
    channel.send(Inline(b"late"))?;
    let again = channel.reset()?.handshake(peer)?;
    drop(again);
    Ok(())
}
