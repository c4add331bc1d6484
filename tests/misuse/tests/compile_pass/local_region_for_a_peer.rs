use ibverbs::{RemoteMemoryRegion, SharedMemoryRegion};

pub fn case(region: &SharedMemoryRegion<'_, u8>) -> RemoteMemoryRegion {
    region.remote()
}
