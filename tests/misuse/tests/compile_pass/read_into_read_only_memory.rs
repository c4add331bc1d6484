use ibverbs::memory::BorrowedMemoryRegion;
use ibverbs::{QueuePair, RemoteMemoryRegion, Result};

pub fn case(
    pair: &mut QueuePair<'_>,
    region: &mut BorrowedMemoryRegion<'_, '_, u8>,
    remote: RemoteMemoryRegion,
) -> Result<()> {
    unsafe { pair.post_read(region, .., remote, 1) }
}
