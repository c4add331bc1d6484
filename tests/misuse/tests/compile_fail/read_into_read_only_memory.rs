use ibverbs::memory::ReadOnlyMemoryRegion;
use ibverbs::{QueuePair, RemoteMemoryRegion, Result};

pub fn case(
    pair: &mut QueuePair<'_>,
    region: &mut ReadOnlyMemoryRegion<'_, '_, u8>,
    remote: RemoteMemoryRegion,
) -> Result<()> {
    unsafe { pair.post_read(region, .., remote, 1) }
}

fn main() {}
