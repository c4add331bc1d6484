use ibverbs::{CompletionQueue, Result};

pub fn case(queue: CompletionQueue<'_>) -> Result<()> {
    let poller = queue.extended_poller()?;
    drop(poller); //~ RIGHT
    drop(queue);
    drop(poller); //~ ERROR
    Ok(())
}
