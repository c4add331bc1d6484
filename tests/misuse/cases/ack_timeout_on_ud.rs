use ibverbs::{AckTimeout, QueuePairBuilder, Ud}; //~ ERROR
use ibverbs::{AckTimeout, QueuePairBuilder, Rc}; //~ RIGHT

pub fn case(builder: QueuePairBuilder<'_, Ud>) -> QueuePairBuilder<'_, Ud> { //~ ERROR
pub fn case(builder: QueuePairBuilder<'_, Rc>) -> QueuePairBuilder<'_, Rc> { //~ RIGHT
    builder.ack_timeout(AckTimeout::default())
}
