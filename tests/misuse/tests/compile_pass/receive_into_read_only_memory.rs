use ibverbs::memory::BorrowedMemoryRegion;
use ibverbs::{QueuePair, Result};

pub fn case(pair: &mut QueuePair<'_>, region: &mut BorrowedMemoryRegion<'_, '_, u8>) -> Result<()> {
    unsafe { pair.post_receive(region, .., 1) }
}
