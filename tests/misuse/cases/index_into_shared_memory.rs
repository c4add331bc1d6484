use ibverbs::SharedMemoryRegion;

pub fn case(region: &SharedMemoryRegion<'_, u8>) -> ibverbs::Result<u8> {
    let slice = region.slice(..4)?;
    Ok(slice[0]) //~ ERROR
    slice.read_one(0) //~ RIGHT
}
