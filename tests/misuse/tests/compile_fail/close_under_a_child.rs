use ibverbs::{Context, Result};

pub fn case(context: Context<'_>) -> Result<()> {
    let domain = context.alloc_pd()?;
    context.close()?;
    drop(domain);
    Ok(())
}

fn main() {}
