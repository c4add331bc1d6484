use ibverbs::{AddressHandle, QueuePair, Result, SendWorkRequest, Ud, operation::{DatagramPeer, PreparedRequest}};

pub fn case(pair: &mut QueuePair<'_, Ud>, path: &AddressHandle<'_>) -> Result<()> {
    let _peer = DatagramPeer { path, number: 7, qkey: 1 }; //~ ERROR
    let mut request = PreparedRequest::new(SendWorkRequest::new(()), 0)?; //~ ERROR
    let peer = DatagramPeer { path, number: 7, qkey: 1 }; //~ RIGHT
    let mut request = PreparedRequest::new(SendWorkRequest::new(()).to(peer), 0)?; //~ RIGHT
    unsafe { pair.post_prepared(&mut request, 1) }
}
