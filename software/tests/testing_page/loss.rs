use std::error::Error;
use std::time::Duration;

use ibverbs_software::{Network, Trace};

/// Sends a megabyte over a bad network; returns what the network saw, and how long it took.
fn transfer(seed: u64) -> Result<(Trace, Duration), Box<dyn Error>> {
    let network = Network::builder()
        .seed(seed)
        .loss(0.01)
        .reorder(0.01)
        .delay(Duration::from_micros(20))
        .bandwidth(3_000_000_000)
        .build();
    let (near, far) = (network.device()?.open()?, network.device()?.open()?);
    let (near, far) = (near.alloc_pd()?, far.alloc_pd()?);
    let (one, other) = (near.create_channel().build()?, far.create_channel().build()?);
    let (to_one, to_other) = (one.endpoint(), other.endpoint());
    let (mut one, mut other) = (one.handshake(to_other)?, other.handshake(to_one)?);
    let (mut from, mut to) = (near.allocate::<u8>(1 << 20)?, far.allocate::<u8>(1 << 20)?);
    from.iter_mut().enumerate().for_each(|(i, byte)| *byte = (i * 31 / 7) as u8);
    other.scope(|scope| {
        let receive = scope.post_receive(to.slice_mut(..)?)?;
        one.send(from.slice(..)?)?;
        receive.wait().map(|_| ())
    })?;
    assert!(from[..] == to[..]);
    Ok((network.trace(), network.now()))
}

#[test]
fn losses_cost_time_only_and_a_seed_repeats_them() -> Result<(), Box<dyn Error>> {
    let (trace, took) = transfer(7)?;
    assert!(trace.lost() > 0, "{trace}");
    assert!(took > Duration::from_micros(350), "a megabyte at 3 GB/s");
    assert!((trace, took) == transfer(7)?, "the same packets at the same times");
    Ok(())
}
