use ibverbs::{ChannelBuilder, Context, Result};
use std::sync::Arc; //~ RIGHT

pub fn case<'a>(context: &'a Context<'_>) -> Result<ChannelBuilder<'a>> {
    let domain = context.alloc_pd()?; //~ ERROR
    let builder = domain.create_channel(); //~ ERROR
    let domain = Arc::new(context.alloc_pd()?); //~ RIGHT
    let builder = ChannelBuilder::new(domain); //~ RIGHT
    Ok(builder)
}
