use ibverbs::work_queue::{WorkQueue, Flags};
use ibverbs::{CompletionQueue, ProtectionDomain, Result};

pub fn case(domain: &ProtectionDomain<'_>, queue: CompletionQueue<'_>) -> Result<()> {
    let work_queue = WorkQueue::new(domain, &queue, 1, 1, Flags::empty())?;
    drop(work_queue); //~ RIGHT
    drop(queue);
    drop(work_queue); //~ ERROR
    Ok(())
}
