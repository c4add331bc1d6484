use ibverbs::flow::FlowCounters;
use ibverbs::{Context, Result};

pub fn case(context: Context<'_>) -> Result<()> {
    let counters = FlowCounters::new(&context)?;
    drop(counters); //~ RIGHT
    drop(context);
    drop(counters); //~ ERROR
    Ok(())
}
