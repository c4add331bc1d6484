use ibverbs::{Inline, QueuePair, Result, SendWorkRequest};

pub fn case(pair: &mut QueuePair<'_>) -> Result<()> {
    let build = |batch: &mut ibverbs::operation::Batch<'_>| {
        let mut add = || batch.add(SendWorkRequest::new(Inline(b"one")), 1);
        add()
    };
    std::thread::scope(|threads| threads.spawn(|| unsafe { pair.batch(build) }).join().unwrap())
}
