use ibverbs::flow::Counters;
use ibverbs::{Context, Result};

pub fn case(context: Context<'_>) -> Result<()> {
    let counters = Counters::new(&context)?;
    drop(counters); //~ RIGHT
    drop(context);
    drop(counters); //~ ERROR
    Ok(())
}
