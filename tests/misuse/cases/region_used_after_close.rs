use ibverbs::{MemoryRegion, Result};

pub fn case(region: MemoryRegion<'_, u8>) -> Result<u8> {
    let first = region[0]; //~ RIGHT
    region.close()?;
    Ok(region[0]) //~ ERROR
    Ok(first) //~ RIGHT
}
