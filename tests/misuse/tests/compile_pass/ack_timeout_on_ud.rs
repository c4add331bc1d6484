use ibverbs::{AckTimeout, QueuePairBuilder, Rc};

pub fn case(builder: QueuePairBuilder<'_, Rc>) -> QueuePairBuilder<'_, Rc> {
    builder.ack_timeout(AckTimeout::default())
}
