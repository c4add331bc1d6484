use ibverbs::{CompletionQueue, Result};

pub fn case(queue: CompletionQueue<'_>) -> Result<()> {
    let poller = queue.extended_poller()?;
    drop(queue);
    drop(poller);
    Ok(())
}

fn main() {}
