use ibverbs::operation::Batch;
use ibverbs::{Inline, QueuePair, Result, SendWorkRequest};

pub fn case(pair: &mut QueuePair<'_>) -> Result<()> {
    let body = |batch: &mut Batch<'_>| {
        batch.add(SendWorkRequest::new(Inline(b"one")), 1)?;
        unsafe { pair.post(SendWorkRequest::new(Inline(b"two")), 2) }
    };
    unsafe { pair.batch(body) }
}

fn main() {}
