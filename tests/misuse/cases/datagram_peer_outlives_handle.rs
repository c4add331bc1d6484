use ibverbs::{AddressHandle, operation::DatagramPeer};

pub fn case(handle: AddressHandle<'_>) -> u32 {
    let peer = DatagramPeer::group(&handle, 7);
    let number = peer.number; //~ RIGHT
    drop(handle);
    peer.number //~ ERROR
    number //~ RIGHT
}
