use ibverbs::memory::ReadOnlyMemoryRegion;
use ibverbs::{QueuePair, Result};

pub fn case(pair: &mut QueuePair<'_>, region: &mut ReadOnlyMemoryRegion<'_, '_, u8>) -> Result<()> {
    unsafe { pair.post_receive(region, .., 1) }
}

fn main() {}
