use ibverbs::{MemoryRegion, RemoteMemoryRegion}; //~ ERROR
use ibverbs::{RemoteMemoryRegion, SharedMemoryRegion}; //~ RIGHT

pub fn case(region: &MemoryRegion<'_, u8>) -> RemoteMemoryRegion { //~ ERROR
pub fn case(region: &SharedMemoryRegion<'_, u8>) -> RemoteMemoryRegion { //~ RIGHT
    region.remote()
}
