use ibverbs::{AccessFlags, DeviceMemory, ProtectionDomain, Result};

pub fn case(domain: &ProtectionDomain<'_>, memory: DeviceMemory<'_>) -> Result<()> {
    let region = memory.register(domain, .., AccessFlags::LOCAL_WRITE)?;
    drop(region);
    drop(memory);
    Ok(())
}
