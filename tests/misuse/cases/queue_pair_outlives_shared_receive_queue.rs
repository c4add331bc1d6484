use ibverbs::{QueuePair, QueuePairBuilder, QueuePairEndpoint, Result, SharedReceiveQueue};

pub fn case<'a>(
    builder: QueuePairBuilder<'a>,
    receives: SharedReceiveQueue<'a>, //~ ERROR
    receives: &'a SharedReceiveQueue<'a>, //~ RIGHT
    peer: QueuePairEndpoint,
) -> Result<QueuePair<'a>> {
    Ok(builder.srq(&receives).build()?.handshake(peer)?) //~ ERROR
    Ok(builder.srq(receives).build()?.handshake(peer)?) //~ RIGHT
}
