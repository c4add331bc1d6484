use ibverbs::{CompletionQueue, Result, WorkCompletion};

pub fn case(queue: &CompletionQueue<'_>) -> Result<bool> {
    let mut room = [WorkCompletion::default(); 8];
    let first = queue.poll(&mut room)?.len();
    let second = queue.poll(&mut room)?;
    Ok(first == second.len())
}
