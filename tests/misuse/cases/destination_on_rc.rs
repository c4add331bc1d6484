use ibverbs::{DatagramPeer, Inline, QueuePair, Result, SendWorkRequest}; //~ ERROR
use ibverbs::{DatagramPeer, Inline, QueuePair, Result, SendWorkRequest, Ud}; //~ RIGHT

pub fn case(pair: &mut QueuePair<'_>, peer: DatagramPeer<'_>) -> Result<()> { //~ ERROR
pub fn case(pair: &mut QueuePair<'_, Ud>, peer: DatagramPeer<'_>) -> Result<()> { //~ RIGHT
    unsafe { pair.post(SendWorkRequest::new(Inline(b"text")).to(peer), 1) }
}
