use ibverbs::{QueuePairBuilder, Ud, settings::AckTimeout}; //~ ERROR
use ibverbs::{QueuePairBuilder, Rc, settings::AckTimeout}; //~ RIGHT

pub fn case(builder: QueuePairBuilder<'_, Ud>) -> QueuePairBuilder<'_, Ud> { //~ ERROR
pub fn case(builder: QueuePairBuilder<'_, Rc>) -> QueuePairBuilder<'_, Rc> { //~ RIGHT
    builder.ack_timeout(AckTimeout::default())
}
