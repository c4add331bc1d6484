use ibverbs::flow::{EspAction, Rule};
use ibverbs::work_queue::ReceiveScalingQueuePair;
use ibverbs::Result;

pub fn case(queue_pair: ReceiveScalingQueuePair<'_>, action: EspAction<'_>) -> Result<()> {
    let mut queue_pair = queue_pair;
    queue_pair.create_flow(&Rule::new(1).action(&action))?;
    drop(queue_pair); //~ RIGHT
    drop(action);
    drop(queue_pair); //~ ERROR
    Ok(())
}
