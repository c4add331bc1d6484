use ibverbs::{Inline, QueuePair, Result, SendFlags};

pub fn case(pair: &mut QueuePair<'_>) -> Result<()> {
    let build = |batch: &mut ibverbs::Batch<'_>| {
        let add = || batch.send(1, SendFlags::empty(), Inline(b"one"));
        std::thread::scope(|threads| threads.spawn(add).join().unwrap())
    };
    unsafe { pair.batch(build) }
}

fn main() {}
