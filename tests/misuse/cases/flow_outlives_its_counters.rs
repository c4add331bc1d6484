use ibverbs::flow::{Counters, Rule};
use ibverbs::{QueuePair, Result};

pub fn case(queue_pair: QueuePair<'_>, counters: Counters<'_>) -> Result<()> {
    let mut queue_pair = queue_pair;
    queue_pair.create_flow(&Rule::new(1).count(&counters))?;
    drop(queue_pair); //~ RIGHT
    drop(counters);
    drop(queue_pair); //~ ERROR
    Ok(())
}
