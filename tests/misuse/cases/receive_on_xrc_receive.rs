use ibverbs::queue_pair::XrcReceive; //~ ERROR
use ibverbs::{MemoryRegion, QueuePair, Result}; //~ ERROR
use ibverbs::{MemoryRegion, QueuePair, Rc, Result}; //~ RIGHT

pub fn case(pair: &mut QueuePair<'_, XrcReceive>, region: &mut MemoryRegion<'_, u8>) -> Result<()> { //~ ERROR
pub fn case(pair: &mut QueuePair<'_, Rc>, region: &mut MemoryRegion<'_, u8>) -> Result<()> { //~ RIGHT
    unsafe { pair.post_receive(region, .., 1) }
}
