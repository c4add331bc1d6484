use ibverbs::{Inline, QueuePair, Result, SendWorkRequest};

pub fn case(pair: &mut QueuePair<'_>) -> Result<()> {
    let (mut send, _receive) = pair.split();
    unsafe {
        send.post(SendWorkRequest::new(Inline(b"two")), 2)?;
        pair.post(SendWorkRequest::new(Inline(b"one")), 1)?;
    }
    Ok(())
}
