use ibverbs::{Result, SharedMemoryRegion};

pub fn case(region: SharedMemoryRegion<'_, u8>) -> Result<()> {
    let slice = region.slice(..4)?;
    assert_eq!(slice.len(), 4); //~ RIGHT
    drop(region);
    assert_eq!(slice.len(), 4); //~ ERROR
    Ok(())
}
