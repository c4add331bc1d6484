use ibverbs::{ProtectionDomain, RemoteMemoryRegion, Result}; //~ ERROR
use ibverbs::{AccessFlags, ProtectionDomain, RemoteMemoryRegion, Result}; //~ RIGHT

pub fn case(domain: &ProtectionDomain<'_>) -> Result<RemoteMemoryRegion> {
    domain.allocate::<u8>(64)?.remote_range(..8) //~ ERROR
    domain.allocate_shared::<u8>(64, AccessFlags::REMOTE_READ)?.remote_range(..8) //~ RIGHT
}
