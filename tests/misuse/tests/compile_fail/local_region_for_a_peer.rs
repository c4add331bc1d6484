use ibverbs::{MemoryRegion, RemoteMemoryRegion};

pub fn case(region: &MemoryRegion<'_, u8>) -> RemoteMemoryRegion {
    region.remote()
}

fn main() {}
