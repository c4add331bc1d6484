use ibverbs::channel::DatagramsBuilder;
use ibverbs::{Context, Loop, PooledBuffer, Result};

pub fn case(context: &Context<'_>) -> Result<()> {
    let domain = context.alloc_pd()?; //~ RIGHT
    let mut here = Loop::<PooledBuffer>::new(context, 64)?;
    let domain = context.alloc_pd()?; //~ ERROR
    here.add_datagrams(DatagramsBuilder::new(&domain))?;
    drop(here); //~ RIGHT
    Ok(())
}
