use ibverbs::{QueuePair, Result};

pub fn case(mut queue_pair: QueuePair<'_>) -> Result<()> {
    let (mut send, _receive) = queue_pair.split();
    drop(queue_pair);
    unsafe { send.post_inline(b"late", 1) }
}

fn main() {}
