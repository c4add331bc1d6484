use ibverbs::{PreparedQueuePair, QueuePair, QueuePairEndpoint, Result};

pub fn case(pair: PreparedQueuePair<'_>, _: QueuePairEndpoint) -> Result<QueuePair<'_>> {
    Ok(pair.activate()?)
}

fn main() {}
