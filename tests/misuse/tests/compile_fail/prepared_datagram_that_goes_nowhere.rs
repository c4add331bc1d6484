use ibverbs::{AddressHandle, DatagramPeer, PreparedRequest, QueuePair, Result, SendWorkRequest, Ud};

pub fn case(pair: &mut QueuePair<'_, Ud>, path: &AddressHandle<'_>) -> Result<()> {
    let _peer = DatagramPeer { path, number: 7, qkey: 1 };
    let mut request = PreparedRequest::new(SendWorkRequest::new(()), 0)?;
    unsafe { pair.post_prepared(&mut request, 1) }
}

fn main() {}
