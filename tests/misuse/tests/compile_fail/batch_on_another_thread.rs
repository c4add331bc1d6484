use ibverbs::{Inline, QueuePair, Result, SendWorkRequest};

pub fn case(pair: &mut QueuePair<'_>) -> Result<()> {
    let build = |batch: &mut ibverbs::operation::Batch<'_>| {
        let add = || batch.add(SendWorkRequest::new(Inline(b"one")), 1);
        std::thread::scope(|threads| threads.spawn(add).join().unwrap())
    };
    unsafe { pair.batch(build) }
}

fn main() {}
