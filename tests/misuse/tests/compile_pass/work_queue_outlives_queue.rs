use ibverbs::{CompletionQueue, ProtectionDomain, Result, WorkQueue, WorkQueueFlags};

pub fn case(domain: &ProtectionDomain<'_>, queue: CompletionQueue<'_>) -> Result<()> {
    let work_queue = WorkQueue::new(domain, &queue, 1, 1, WorkQueueFlags::empty())?;
    drop(work_queue);
    drop(queue);
    Ok(())
}
