use ibverbs::{Result, SharedMemoryRegion};

pub fn case(region: &SharedMemoryRegion<'_, u32>) -> Result<u32> {
    Ok(region[7]) //~ ERROR
    region.slice(..)?.read_one(7) //~ RIGHT
}
