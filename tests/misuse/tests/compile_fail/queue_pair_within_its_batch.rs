use ibverbs::{Batch, Inline, QueuePair, Result, SendFlags};

pub fn case(pair: &mut QueuePair<'_>) -> Result<()> {
    let body = |batch: &mut Batch<'_>| {
        batch.send(1, SendFlags::empty(), Inline(b"one"))?;
        unsafe { pair.post_inline(b"two", 2) }
    };
    unsafe { pair.batch(body) }
}

fn main() {}
