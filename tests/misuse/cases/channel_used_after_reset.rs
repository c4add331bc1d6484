use ibverbs::{Channel, Inline, QueuePairEndpoint, TransportResult};

pub fn case(mut channel: Channel<'_>, peer: QueuePairEndpoint) -> TransportResult<()> {
    channel.send(Inline(b"late"))?; //~ RIGHT
    let again = channel.reset()?.handshake(peer)?;
    channel.send(Inline(b"late"))?; //~ ERROR
    drop(again);
    Ok(())
}
