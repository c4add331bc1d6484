use ibverbs::{PreparedQueuePair, QueuePair, QueuePairEndpoint, Result};

type Two<'a> = (QueuePair<'a>, QueuePair<'a>);

pub fn case<'a>(pairs: [PreparedQueuePair<'a>; 2], peer: QueuePairEndpoint) -> Result<Two<'a>> {
    let [one, two] = pairs;
    Ok((one.handshake(peer)?, two.handshake(peer)?))
}
