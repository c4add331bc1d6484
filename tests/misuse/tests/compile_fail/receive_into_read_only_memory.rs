use ibverbs::{QueuePair, ReadOnlyMemoryRegion, Result};

pub fn case(pair: &mut QueuePair<'_>, region: &mut ReadOnlyMemoryRegion<'_, '_, u8>) -> Result<()> {
    unsafe { pair.post_receive(region, .., 1) }
}

fn main() {}
