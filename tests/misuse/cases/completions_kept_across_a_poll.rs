use ibverbs::{CompletionQueue, Result, WorkCompletion};

pub fn case(queue: &CompletionQueue<'_>) -> Result<bool> {
    let mut room = [WorkCompletion::default(); 8];
    let first = queue.poll(&mut room)?; //~ ERROR
    let first = queue.poll(&mut room)?.len(); //~ RIGHT
    let second = queue.poll(&mut room)?;
    Ok(first.len() == second.len()) //~ ERROR
    Ok(first == second.len()) //~ RIGHT
}
