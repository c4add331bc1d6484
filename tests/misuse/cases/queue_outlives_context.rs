use ibverbs::{Context, Result};

pub fn case(context: Context<'_>) -> Result<()> {
    let queue = context.create_cq(8)?;
    drop(queue); //~ RIGHT
    drop(context);
    drop(queue); //~ ERROR
    Ok(())
}
