use ibverbs::{ProtectionDomain, QueuePairEndpoint, Result};

pub fn case(domain: ProtectionDomain<'_>, peer: QueuePairEndpoint) -> Result<u32> {
    let channel = domain.create_channel().build()?.handshake(peer)?;
    let number = channel.number(); //~ RIGHT
    drop(channel); //~ RIGHT
    drop(domain);
    Ok(channel.number()) //~ ERROR
    Ok(number) //~ RIGHT
}
