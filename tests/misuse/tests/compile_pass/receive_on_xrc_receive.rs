use ibverbs::{MemoryRegion, QueuePair, Rc, Result};

pub fn case(pair: &mut QueuePair<'_, Rc>, region: &mut MemoryRegion<'_, u8>) -> Result<()> {
    unsafe { pair.post_receive(region, .., 1) }
}
