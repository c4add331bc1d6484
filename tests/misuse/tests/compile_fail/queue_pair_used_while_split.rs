use ibverbs::{QueuePair, Result};

pub fn case(pair: &mut QueuePair<'_>) -> Result<()> {
    let (mut send, receive) = pair.split();
    unsafe {
        pair.post_inline(b"one", 1)?;
        send.post_inline(b"two", 2)?;
    }
    drop(receive);
    Ok(())
}

fn main() {}
