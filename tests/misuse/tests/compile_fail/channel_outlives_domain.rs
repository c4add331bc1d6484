use ibverbs::{ChannelBuilder, Context, Result};

pub fn case<'a>(context: &'a Context<'_>) -> Result<ChannelBuilder<'a>> {
    let domain = context.alloc_pd()?;
    let builder = domain.create_channel();
    Ok(builder)
}

fn main() {}
