use ibverbs::{DatagramPeer, Inline, QueuePair, Result, SendWorkRequest, Ud};

pub fn case(pair: &mut QueuePair<'_, Ud>, _: DatagramPeer<'_>) -> Result<()> {
    unsafe { pair.post(SendWorkRequest::new(Inline(b"text")), 1) }
}

fn main() {}
