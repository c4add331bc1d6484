use ibverbs::{MemoryRegion, ReceiveWorkRequest, Result};

pub fn case(region: &mut MemoryRegion<'_, u8>) -> Result<()> { //~ ERROR
    let head = region.scatter_element(..8)?; //~ ERROR
    let all = region.scatter_element(..)?; //~ ERROR
pub fn case(regions: &mut [MemoryRegion<'_, u8>; 2]) -> Result<()> { //~ RIGHT
    let [one, two] = regions; //~ RIGHT
    let head = one.scatter_element(..8)?; //~ RIGHT
    let all = two.scatter_element(..)?; //~ RIGHT
    drop(ReceiveWorkRequest::new(&mut [head, all]));
    Ok(())
}
