use ibverbs::{Channel, QueuePairEndpoint, TransportResult};

pub fn case(mut channel: Channel<'_>, peer: QueuePairEndpoint) -> TransportResult<()> {
    channel.send_inline(b"late")?;
    let again = channel.reset()?.handshake(peer)?;
    drop(again);
    Ok(())
}
