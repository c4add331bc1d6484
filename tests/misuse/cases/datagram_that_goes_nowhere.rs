use ibverbs::{Inline, QueuePair, Result, SendWorkRequest, Ud, operation::DatagramPeer};

pub fn case(pair: &mut QueuePair<'_, Ud>, _: DatagramPeer<'_>) -> Result<()> { //~ ERROR
    unsafe { pair.post(SendWorkRequest::new(Inline(b"text")), 1) } //~ ERROR
pub fn case(pair: &mut QueuePair<'_, Ud>, peer: DatagramPeer<'_>) -> Result<()> { //~ RIGHT
    unsafe { pair.post(SendWorkRequest::new(Inline(b"text")).to(peer), 1) } //~ RIGHT
}
