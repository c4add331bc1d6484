use ibverbs::{QueuePair, QueuePairBuilder, QueuePairEndpoint, Result, SharedReceiveQueue};

pub fn case<'a>(
    builder: QueuePairBuilder<'a>,
    receives: &'a SharedReceiveQueue<'a>,
    peer: QueuePairEndpoint,
) -> Result<QueuePair<'a>> {
    Ok(builder.srq(receives).build()?.handshake(peer)?)
}
