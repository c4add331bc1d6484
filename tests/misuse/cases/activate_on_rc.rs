use ibverbs::{PreparedQueuePair, QueuePair, QueuePairEndpoint, Result};

pub fn case(pair: PreparedQueuePair<'_>, _: QueuePairEndpoint) -> Result<QueuePair<'_>> { //~ ERROR
    Ok(pair.activate()?) //~ ERROR
pub fn case(pair: PreparedQueuePair<'_>, peer: QueuePairEndpoint) -> Result<QueuePair<'_>> { //~ RIGHT
    Ok(pair.handshake(peer)?) //~ RIGHT
}
