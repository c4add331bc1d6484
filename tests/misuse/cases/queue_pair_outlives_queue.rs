use ibverbs::{CompletionQueue, ProtectionDomain, QueuePairType, Result};

pub fn case(domain: &ProtectionDomain<'_>, queue: CompletionQueue<'_>) -> Result<()> {
    let kind = QueuePairType::ReliableConnected;
    let queue_pair = domain.create_qp(&queue, &queue, kind).build()?;
    drop(queue_pair); //~ RIGHT
    drop(queue);
    drop(queue_pair); //~ ERROR
    Ok(())
}
