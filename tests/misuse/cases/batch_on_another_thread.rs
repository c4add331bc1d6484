use ibverbs::{Inline, QueuePair, Result, SendWorkRequest};

pub fn case(pair: &mut QueuePair<'_>) -> Result<()> {
    let build = |batch: &mut ibverbs::operation::Batch<'_>| {
        let add = || batch.add(SendWorkRequest::new(Inline(b"one")), 1); //~ ERROR
        std::thread::scope(|threads| threads.spawn(add).join().unwrap()) //~ ERROR
        let mut add = || batch.add(SendWorkRequest::new(Inline(b"one")), 1); //~ RIGHT
        add() //~ RIGHT
    };
    unsafe { pair.batch(build) } //~ ERROR
    std::thread::scope(|threads| threads.spawn(|| unsafe { pair.batch(build) }).join().unwrap()) //~ RIGHT
}
