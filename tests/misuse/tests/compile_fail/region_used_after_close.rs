use ibverbs::{MemoryRegion, Result};

pub fn case(region: MemoryRegion<'_, u8>) -> Result<u8> {
    region.close()?;
    Ok(region[0])
}

fn main() {}
