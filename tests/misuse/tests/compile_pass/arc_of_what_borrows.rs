use std::sync::Arc;

use ibverbs::{CompletionQueue, Context, Result};

pub fn case(context: &Arc<Context<'static>>) -> Result<Arc<CompletionQueue<'static>>> {
    let queue = CompletionQueue::new(context, 8)?;
    Ok(Arc::new(queue))
}
