use ibverbs::{PreparedQueuePair, QueuePair, QueuePairEndpoint, Result};

pub fn case(pair: PreparedQueuePair<'_>, peer: QueuePairEndpoint) -> Result<QueuePair<'_>> {
    Ok(pair.handshake(peer)?)
}
