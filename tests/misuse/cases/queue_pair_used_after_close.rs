use ibverbs::{Inline, QueuePair, Result, SendWorkRequest};

pub fn case(mut pair: QueuePair<'_>) -> Result<()> {
    pair.close()?; //~ ERROR
    unsafe { pair.post(SendWorkRequest::new(Inline(b"late")), 1) } //~ ERROR
    unsafe { pair.post(SendWorkRequest::new(Inline(b"late")), 1) }?; //~ RIGHT
    pair.close() //~ RIGHT
}
