use ibverbs::{ProtectionDomain, Result};

pub fn case(domain: &ProtectionDomain<'_>, bytes: &mut [u8]) -> Result<()> {
    let (head, tail) = bytes.split_at_mut(4);
    let one = domain.register(head)?;
    let two = domain.register(tail)?;
    drop((one, two));
    Ok(())
}
