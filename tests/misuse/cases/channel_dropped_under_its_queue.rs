use ibverbs::{CompletionChannel, CompletionQueue, Context, Result};

pub fn case(context: &Context<'_>) -> Result<()> {
    let channel = CompletionChannel::new(context)?;
    let queue = CompletionQueue::builder(context, 1).channel(&channel).build()?;
    queue.arm()?; //~ RIGHT
    drop(queue); //~ RIGHT
    drop(channel);
    queue.arm() //~ ERROR
    Ok(()) //~ RIGHT
}
