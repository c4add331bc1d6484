use ibverbs::{Channel, ProtectionDomain as Domain, TransportResult as Result};

pub fn case(channel: &mut Channel<'_>, domain: &Domain<'_>, mut bytes: Vec<u8>) -> Result<()> {
    bytes.resize(1 << 20, 0); //~ RIGHT
    let mut region = domain.register(&mut bytes)?;
    channel.manual_scope(|s| {
        let receive = s.post_receive(region.slice_mut(..)?)?;
        bytes.resize(1 << 20, 0); //~ ERROR
        receive.wait().map(drop)
    })
}
