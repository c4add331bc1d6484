use ibverbs::SharedMemoryRegion;

pub fn case(region: &SharedMemoryRegion<'_, u8>) -> u8 {
    let bytes: &[u8] = region;
    bytes[0]
}

fn main() {}
