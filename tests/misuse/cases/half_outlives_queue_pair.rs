use ibverbs::{Inline, QueuePair, Result, SendWorkRequest};

pub fn case(mut queue_pair: QueuePair<'_>) -> Result<()> {
    let (mut send, _receive) = queue_pair.split();
    unsafe { send.post(SendWorkRequest::new(Inline(b"late")), 1) }?; //~ RIGHT
    drop(queue_pair);
    unsafe { send.post(SendWorkRequest::new(Inline(b"late")), 1) } //~ ERROR
    Ok(()) //~ RIGHT
}
