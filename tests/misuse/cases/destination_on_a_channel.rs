use ibverbs::operation::XrcPeer;
use ibverbs::{Channel, SendWorkRequest, TransportResult, memory::MemorySlice};

pub fn case(channel: &mut Channel<'_>, slice: MemorySlice<'_, u8>) -> TransportResult<()> {
    let request = SendWorkRequest::new(slice);
    let _ = XrcPeer(1);
    channel.run(request.to(XrcPeer(1))).map(drop) //~ ERROR
    channel.run(request).map(drop) //~ RIGHT
}
