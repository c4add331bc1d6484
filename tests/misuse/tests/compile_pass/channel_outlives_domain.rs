use ibverbs::{ChannelBuilder, Context, Result};
use std::sync::Arc;

pub fn case<'a>(context: &'a Context<'_>) -> Result<ChannelBuilder<'a>> {
    let domain = Arc::new(context.alloc_pd()?);
    let builder = ChannelBuilder::new(domain);
    Ok(builder)
}
