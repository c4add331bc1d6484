use ibverbs::{DatagramPeer, Inline, QueuePair, Result, SendWorkRequest, Ud};

pub fn case(pair: &mut QueuePair<'_, Ud>, peer: DatagramPeer<'_>) -> Result<()> {
    unsafe { pair.post(SendWorkRequest::new(Inline(b"text")).to(peer), 1) }
}
