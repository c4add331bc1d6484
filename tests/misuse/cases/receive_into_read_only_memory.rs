use ibverbs::memory::ReadOnlyMemoryRegion; //~ ERROR
use ibverbs::memory::BorrowedMemoryRegion; //~ RIGHT
use ibverbs::{QueuePair, Result};

pub fn case(pair: &mut QueuePair<'_>, region: &mut ReadOnlyMemoryRegion<'_, '_, u8>) -> Result<()> { //~ ERROR
pub fn case(pair: &mut QueuePair<'_>, region: &mut BorrowedMemoryRegion<'_, '_, u8>) -> Result<()> { //~ RIGHT
    unsafe { pair.post_receive(region, .., 1) }
}
