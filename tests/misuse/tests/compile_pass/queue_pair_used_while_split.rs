use ibverbs::{QueuePair, Result};

pub fn case(pair: &mut QueuePair<'_>) -> Result<()> {
    let (mut send, _receive) = pair.split();
    unsafe {
        send.post_inline(b"two", 2)?;
        pair.post_inline(b"one", 1)?;
    }
    Ok(())
}
