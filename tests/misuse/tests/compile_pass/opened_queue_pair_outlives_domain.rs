use ibverbs::{OpenedQueuePair, Result, XrcDomain};

pub fn case(domain: XrcDomain<'_>) -> Result<()> {
    let queue_pair = OpenedQueuePair::open(&domain, 7)?;
    drop(queue_pair);
    drop(domain);
    Ok(())
}
