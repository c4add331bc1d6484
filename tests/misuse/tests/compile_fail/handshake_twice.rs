use ibverbs::{PreparedQueuePair, QueuePair, QueuePairEndpoint, Result};

type Two<'a> = (QueuePair<'a>, QueuePair<'a>);

pub fn case<'a>(pair: PreparedQueuePair<'a>, peer: QueuePairEndpoint) -> Result<Two<'a>> {
    Ok((pair.handshake(peer)?, pair.handshake(peer)?))
}

fn main() {}
