use ibverbs::{Context, Result};

pub fn case(context: Context<'_>) -> Result<()> {
    let _domain = context.alloc_pd()?;
    drop(context);
    Ok(())
}

fn main() {}
