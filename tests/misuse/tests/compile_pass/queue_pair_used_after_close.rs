use ibverbs::{Inline, QueuePair, Result, SendWorkRequest};

pub fn case(mut pair: QueuePair<'_>) -> Result<()> {
    unsafe { pair.post(SendWorkRequest::new(Inline(b"late")), 1) }?;
    pair.close()
}
