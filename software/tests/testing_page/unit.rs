use ibverbs_software::Network;

#[test]
fn a_message_arrives() -> Result<(), Box<dyn std::error::Error>> {
    let network = Network::new();
    let (near, far) = (network.device()?.open()?, network.device()?.open()?);
    let (near, far) = (near.alloc_pd()?, far.alloc_pd()?);
    let (one, other) = (near.create_channel().build()?, far.create_channel().build()?);
    let (to_one, to_other) = (one.endpoint(), other.endpoint());
    let (mut one, mut other) = (one.handshake(to_other)?, other.handshake(to_one)?);
    let (mut from, mut to) = (near.allocate::<u8>(5)?, far.allocate::<u8>(5)?);
    from.copy_from_slice(b"hello");
    other.scope(|scope| {
        let receive = scope.post_receive(to.slice_mut(..)?)?;
        one.send(from.slice(..)?)?;
        receive.wait().map(|_| ())
    })?;
    assert_eq!(&to[..], b"hello");
    Ok(())
}
