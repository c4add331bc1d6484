use std::error::Error;
use std::time::Duration;

use ibverbs::{
    ChannelBuilder, WorkStatus,
    settings::{AckTimeout, MaxAckRetries},
};
use ibverbs_software::Network;

#[test]
fn a_peer_that_is_gone_is_noticed() -> Result<(), Box<dyn Error>> {
    let network = Network::new();
    let devices = [network.device()?, network.device()?];
    let (near, far) = (devices[0].open()?, devices[1].open()?);
    let (near, far) = (near.alloc_pd()?, far.alloc_pd()?);
    let timeout = AckTimeout::from_duration(Duration::from_millis(500))?;
    let one = ChannelBuilder::new(&near).ack_timeout(timeout);
    let one = one.max_ack_retries(MaxAckRetries::new(7)?).build()?;
    let other = far.create_channel().build()?;
    let (to_one, to_other) = (one.endpoint(), other.endpoint());
    let (mut one, _other) = (one.handshake(to_other)?, other.handshake(to_one)?);

    network.partition(&devices[0], &devices[1]);
    let error = one.send(()).unwrap_err();
    assert_eq!(error.work_error().map(|error| error.status()), Some(WorkStatus::RetryExceeded));
    // The device tries once and seven times more: more than four seconds, which have passed in microseconds.
    assert_eq!(network.trace().packets().len(), 8);
    assert!(network.now() > Duration::from_secs(4));
    Ok(())
}
