use ibverbs::{OpenedQueuePair, Result, XrcDomain};

pub fn case(domain: XrcDomain<'_>) -> Result<()> {
    let queue_pair = OpenedQueuePair::open(&domain, 7)?;
    drop(domain);
    drop(queue_pair);
    Ok(())
}

fn main() {}
