use ibverbs::queue_pair::XrcReceive;
use ibverbs::{MemoryRegion, QueuePair, Result};

pub fn case(pair: &mut QueuePair<'_, XrcReceive>, region: &mut MemoryRegion<'_, u8>) -> Result<()> {
    unsafe { pair.post_receive(region, .., 1) }
}

fn main() {}
