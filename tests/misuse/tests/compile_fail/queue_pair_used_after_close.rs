use ibverbs::{QueuePair, Result};

pub fn case(mut pair: QueuePair<'_>) -> Result<()> {
    pair.close()?;
    unsafe { pair.post_inline(b"late", 1) }
}

fn main() {}
