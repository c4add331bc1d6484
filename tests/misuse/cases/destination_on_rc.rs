use ibverbs::{Inline, QueuePair, Result, SendWorkRequest, operation::DatagramPeer}; //~ ERROR
use ibverbs::{Inline, QueuePair, Result, SendWorkRequest, Ud, operation::DatagramPeer}; //~ RIGHT

pub fn case(pair: &mut QueuePair<'_>, peer: DatagramPeer<'_>) -> Result<()> { //~ ERROR
pub fn case(pair: &mut QueuePair<'_, Ud>, peer: DatagramPeer<'_>) -> Result<()> { //~ RIGHT
    unsafe { pair.post(SendWorkRequest::new(Inline(b"text")).to(peer), 1) }
}
