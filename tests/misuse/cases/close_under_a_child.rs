use ibverbs::{Context, Result};

pub fn case(context: Context<'_>) -> Result<()> {
    let domain = context.alloc_pd()?;
    drop(domain); //~ RIGHT
    context.close()?;
    drop(domain); //~ ERROR
    Ok(())
}
