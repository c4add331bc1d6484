use std::os::fd::BorrowedFd;

use ibverbs::memory::SharedMemory;

pub fn case(file: BorrowedFd<'_>) -> ibverbs::Result<SharedMemory> {
    SharedMemory::map_file(file, 0, 4096) //~ ERROR
    SharedMemory::map_memfd(file, 0, 4096) //~ RIGHT
}
