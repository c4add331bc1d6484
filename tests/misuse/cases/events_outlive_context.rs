use ibverbs::{Context, Result};

pub fn case(context: Context<'_>) -> Result<()> {
    let events = context.async_events()?;
    drop(events); //~ RIGHT
    drop(context);
    drop(events); //~ ERROR
    Ok(())
}
