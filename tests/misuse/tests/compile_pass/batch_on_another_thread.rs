use ibverbs::{Inline, QueuePair, Result, SendFlags};

pub fn case(pair: &mut QueuePair<'_>) -> Result<()> {
    let build = |batch: &mut ibverbs::Batch<'_>| {
        let mut add = || batch.send(1, SendFlags::empty(), Inline(b"one"));
        add()
    };
    std::thread::scope(|threads| threads.spawn(|| unsafe { pair.batch(build) }).join().unwrap())
}
