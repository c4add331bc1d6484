use ibverbs::{QueuePair, Result};

pub fn case(mut pair: QueuePair<'_>) -> Result<()> {
    unsafe { pair.post_inline(b"late", 1) }?;
    pair.close()
}
