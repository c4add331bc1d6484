use ibverbs::{CompletionQueue, Result, WorkCompletion};

pub fn case(queue: &CompletionQueue<'_>) -> Result<bool> {
    let mut room = [WorkCompletion::default(); 8];
    let first = queue.poll(&mut room)?;
    let second = queue.poll(&mut room)?;
    Ok(first.len() == second.len())
}

fn main() {}
