use ibverbs::{MemoryRegion, ReceiveWorkRequest, Result};

pub fn case(regions: &mut [MemoryRegion<'_, u8>; 2]) -> Result<()> {
    let [one, two] = regions;
    let head = one.scatter_element(..8)?;
    let all = two.scatter_element(..)?;
    drop(ReceiveWorkRequest::new(&mut [head, all]));
    Ok(())
}
