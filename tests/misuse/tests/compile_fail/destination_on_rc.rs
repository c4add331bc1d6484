use ibverbs::{DatagramPeer, Inline, QueuePair, Result, SendWorkRequest};

pub fn case(pair: &mut QueuePair<'_>, peer: DatagramPeer<'_>) -> Result<()> {
    unsafe { pair.post(SendWorkRequest::new(Inline(b"text")).to(peer), 1) }
}

fn main() {}
