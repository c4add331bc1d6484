use ibverbs::{ChannelId, Loop, MemorySliceMut, PooledBuffer, ReceiveWorkRequest}; //~ ERROR
use ibverbs::{ChannelId, Loop, PooledBuffer, ReceiveWorkRequest}; //~ RIGHT

pub fn case(clients: &mut Loop<'_, PooledBuffer>, id: ChannelId, to: MemorySliceMut<'static, u8>) { //~ ERROR
pub fn case(clients: &mut Loop<'_, PooledBuffer>, id: ChannelId, to: PooledBuffer) { //~ RIGHT
    let _ = clients.post(id, ReceiveWorkRequest::new(to), 0);
}
