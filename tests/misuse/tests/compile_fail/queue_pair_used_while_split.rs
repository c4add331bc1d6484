use ibverbs::{Inline, QueuePair, Result, SendWorkRequest};

pub fn case(pair: &mut QueuePair<'_>) -> Result<()> {
    let (mut send, receive) = pair.split();
    unsafe {
        pair.post(SendWorkRequest::new(Inline(b"one")), 1)?;
        send.post(SendWorkRequest::new(Inline(b"two")), 2)?;
    }
    drop(receive);
    Ok(())
}

fn main() {}
