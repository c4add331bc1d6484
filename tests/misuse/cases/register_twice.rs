use ibverbs::{ProtectionDomain, Result};

pub fn case(domain: &ProtectionDomain<'_>, bytes: &mut [u8]) -> Result<()> {
    let one = domain.register(bytes)?; //~ ERROR
    let two = domain.register(bytes)?; //~ ERROR
    let (head, tail) = bytes.split_at_mut(4); //~ RIGHT
    let one = domain.register(head)?; //~ RIGHT
    let two = domain.register(tail)?; //~ RIGHT
    drop((one, two));
    Ok(())
}
