use ibverbs::domain::XrcDomain;
use ibverbs::queue_pair::OpenedQueuePair;
use ibverbs::Result;

pub fn case(domain: XrcDomain<'_>) -> Result<()> {
    let queue_pair = OpenedQueuePair::open(&domain, 7)?;
    drop(queue_pair); //~ RIGHT
    drop(domain);
    drop(queue_pair); //~ ERROR
    Ok(())
}
