use ibverbs::{PreparedQueuePair, QueuePair, QueuePairEndpoint, Result, Ud};

pub fn case(pair: PreparedQueuePair<'_, Ud>, peer: QueuePairEndpoint) -> Result<QueuePair<'_, Ud>> { //~ ERROR
    Ok(pair.handshake(peer)?) //~ ERROR
pub fn case(pair: PreparedQueuePair<'_, Ud>, _: QueuePairEndpoint) -> Result<QueuePair<'_, Ud>> { //~ RIGHT
    Ok(pair.activate()?) //~ RIGHT
}
