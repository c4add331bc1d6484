use std::sync::Arc;

use ibverbs::{CompletionQueue, Context, Result};

pub fn case(context: &Context<'static>) -> Result<Arc<CompletionQueue<'static>>> { //~ ERROR
pub fn case(context: &Arc<Context<'static>>) -> Result<Arc<CompletionQueue<'static>>> { //~ RIGHT
    let queue = CompletionQueue::new(context, 8)?;
    Ok(Arc::new(queue))
}
