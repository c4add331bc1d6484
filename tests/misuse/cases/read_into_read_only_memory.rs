use ibverbs::memory::ReadOnlyMemoryRegion; //~ ERROR
use ibverbs::memory::BorrowedMemoryRegion; //~ RIGHT
use ibverbs::{QueuePair, RemoteMemoryRegion, Result};

pub fn case(
    pair: &mut QueuePair<'_>,
    region: &mut ReadOnlyMemoryRegion<'_, '_, u8>, //~ ERROR
    region: &mut BorrowedMemoryRegion<'_, '_, u8>, //~ RIGHT
    remote: RemoteMemoryRegion,
) -> Result<()> {
    unsafe { pair.post_read(region, .., remote, 1) }
}
