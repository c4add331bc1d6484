use ibverbs::{Inline, QueuePair, Result, SendWorkRequest};

pub fn case(pair: &mut QueuePair<'_>) -> Result<()> {
    let (mut send, receive) = pair.split(); //~ ERROR
    let (mut send, _receive) = pair.split(); //~ RIGHT
    unsafe {
        send.post(SendWorkRequest::new(Inline(b"two")), 2)?; //~ RIGHT
        pair.post(SendWorkRequest::new(Inline(b"one")), 1)?;
        send.post(SendWorkRequest::new(Inline(b"two")), 2)?; //~ ERROR
    }
    drop(receive); //~ ERROR
    Ok(())
}
