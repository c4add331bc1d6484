use ibverbs::{MemoryRegion, ReceiveWorkRequest, Result};

pub fn case(region: &mut MemoryRegion<'_, u8>) -> Result<()> {
    let head = region.scatter_element(..8)?;
    let all = region.scatter_element(..)?;
    drop(ReceiveWorkRequest::new(&mut [head, all]));
    Ok(())
}

fn main() {}
