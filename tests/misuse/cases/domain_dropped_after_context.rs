use ibverbs::{Context, Result};

pub fn case(context: Context<'_>) -> Result<()> {
    let _domain = context.alloc_pd()?; //~ ERROR
    let domain = context.alloc_pd()?; //~ RIGHT
    drop(domain); //~ RIGHT
    drop(context);
    Ok(())
}
