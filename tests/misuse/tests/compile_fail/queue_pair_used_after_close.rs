use ibverbs::{Inline, QueuePair, Result, SendWorkRequest};

pub fn case(mut pair: QueuePair<'_>) -> Result<()> {
    pair.close()?;
    unsafe { pair.post(SendWorkRequest::new(Inline(b"late")), 1) }
}

fn main() {}
