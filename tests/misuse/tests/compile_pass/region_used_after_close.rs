use ibverbs::{MemoryRegion, Result};

pub fn case(region: MemoryRegion<'_, u8>) -> Result<u8> {
    let first = region[0];
    region.close()?;
    Ok(first)
}
