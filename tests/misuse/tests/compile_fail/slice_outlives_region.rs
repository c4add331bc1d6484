use ibverbs::{Result, SharedMemoryRegion};

pub fn case(region: SharedMemoryRegion<'_, u8>) -> Result<()> {
    let slice = region.slice(..4)?;
    drop(region);
    assert_eq!(slice.len(), 4);
    Ok(())
}

fn main() {}
