use ibverbs::SharedMemoryRegion;

pub fn case(region: &SharedMemoryRegion<'_, u8>) -> u8 {
    let bytes: &[u8] = region; //~ ERROR
    let bytes: &[u8] = &region.to_vec(); //~ RIGHT
    bytes[0]
}
