use ibverbs::{AckTimeout, QueuePairBuilder, Ud};

pub fn case(builder: QueuePairBuilder<'_, Ud>) -> QueuePairBuilder<'_, Ud> {
    builder.ack_timeout(AckTimeout::default())
}

fn main() {}
