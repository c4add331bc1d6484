use ibverbs::memory::{DeviceMemory, DeviceMemoryRegion};
use ibverbs::{AccessFlags, ProtectionDomain, Result};

pub fn case(domain: &ProtectionDomain<'_>, memory: DeviceMemory<'_>) -> Result<()> {
    let region = DeviceMemoryRegion::new(domain, &memory, .., AccessFlags::LOCAL_WRITE)?;
    drop(region); //~ RIGHT
    drop(memory);
    drop(region); //~ ERROR
    Ok(())
}
