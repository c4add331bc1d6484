use ibverbs::{PreparedQueuePair, QueuePair, QueuePairEndpoint, Result, Ud};

pub fn case(pair: PreparedQueuePair<'_, Ud>, peer: QueuePairEndpoint) -> Result<QueuePair<'_, Ud>> {
    Ok(pair.handshake(peer)?)
}

fn main() {}
