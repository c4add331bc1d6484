use ibverbs::{QueuePairEndpoint, Result};

pub fn case(peer: QueuePairEndpoint) -> Result<u32> {
    let context = ibverbs::open("rxe0")?;
    let domain = context.alloc_pd()?;
    let channel = domain.create_channel().build()?.handshake(peer)?;
    drop(context); //~ ERROR
    Ok(channel.number())
}
