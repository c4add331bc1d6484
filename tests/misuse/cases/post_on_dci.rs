use ibverbs::operation::DcPeer;
use ibverbs::queue_pair::Dci;
use ibverbs::{Inline, QueuePair, Result, SendWorkRequest};

pub fn case(pair: &mut QueuePair<'_, Dci>, target: DcPeer<'_>) -> Result<()> {
    unsafe { pair.post(SendWorkRequest::new(Inline(b"text")).to(target), 1) } //~ ERROR
    unsafe { pair.batch(|b| b.add(SendWorkRequest::new(Inline(b"text")).to(target), 1)) } //~ RIGHT
}
