use ibverbs::{EspAction, FlowRule, ReceiveScalingQueuePair, Result};

pub fn case(queue_pair: ReceiveScalingQueuePair<'_>, action: EspAction<'_>) -> Result<()> {
    let mut queue_pair = queue_pair;
    queue_pair.create_flow(&FlowRule::new(1).action(&action))?;
    drop(action);
    drop(queue_pair);
    Ok(())
}

fn main() {}
