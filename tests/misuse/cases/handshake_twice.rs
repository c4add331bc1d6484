use ibverbs::{PreparedQueuePair, QueuePair, QueuePairEndpoint, Result};

type Two<'a> = (QueuePair<'a>, QueuePair<'a>);

pub fn case<'a>(pair: PreparedQueuePair<'a>, peer: QueuePairEndpoint) -> Result<Two<'a>> { //~ ERROR
    Ok((pair.handshake(peer)?, pair.handshake(peer)?)) //~ ERROR
pub fn case<'a>(pairs: [PreparedQueuePair<'a>; 2], peer: QueuePairEndpoint) -> Result<Two<'a>> { //~ RIGHT
    let [one, two] = pairs; //~ RIGHT
    Ok((one.handshake(peer)?, two.handshake(peer)?)) //~ RIGHT
}
