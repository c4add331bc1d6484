use ibverbs::{Context, Result};

pub fn case(context: Context<'_>) -> Result<()> {
    let events = context.async_events()?;
    drop(context);
    drop(events);
    Ok(())
}

fn main() {}
