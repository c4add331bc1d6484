use ibverbs::operation::Batch;
use ibverbs::{Inline, QueuePair, Result, SendWorkRequest};

pub fn case(pair: &mut QueuePair<'_>) -> Result<()> {
    let body = |batch: &mut Batch<'_>| { //~ ERROR
        batch.add(SendWorkRequest::new(Inline(b"one")), 1)?; //~ ERROR
        unsafe { pair.post(SendWorkRequest::new(Inline(b"two")), 2) } //~ ERROR
    }; //~ ERROR
    unsafe { pair.batch(body) } //~ ERROR
    let body = |batch: &mut Batch<'_>| batch.add(SendWorkRequest::new(Inline(b"one")), 1); //~ RIGHT
    unsafe { pair.batch(body) }?; //~ RIGHT
    unsafe { pair.post(SendWorkRequest::new(Inline(b"two")), 2) } //~ RIGHT
}
