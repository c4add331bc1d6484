use std::sync::Arc;

use ibverbs::{ChannelBuilder, Context, PreparedChannel, Result, SharedCompletionQueue};

pub fn case<'a>(
    context: &'a Context<'a>,
    builder: ChannelBuilder<'a>,
) -> Result<PreparedChannel<'a>> {
    let queue = Arc::new(SharedCompletionQueue::new(context, 64)?);
    builder.shared_completion_queue(queue).build()
}
