use ibverbs::channel::AnyBuffer; //~ RIGHT
use ibverbs::pool::SharedMemoryRange;
use ibverbs::{ChannelId, Loop, PooledBuffer, ReceiveWorkRequest}; //~ ERROR
use ibverbs::{ChannelId, Loop, ReceiveWorkRequest}; //~ RIGHT

pub fn case(clients: &mut Loop<'_, PooledBuffer>, id: ChannelId, to: SharedMemoryRange<u8>) { //~ ERROR
pub fn case(clients: &mut Loop<'_, AnyBuffer>, id: ChannelId, to: SharedMemoryRange<u8>) { //~ RIGHT
    let _ = clients.post(id, ReceiveWorkRequest::new(to), 0);
}
