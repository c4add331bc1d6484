use ibverbs::{Context, Result};

pub fn case(context: Context<'_>) -> Result<()> {
    let channel = context.create_comp_channel()?;
    drop(channel); //~ RIGHT
    drop(context);
    drop(channel); //~ ERROR
    Ok(())
}
