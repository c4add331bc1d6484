use ibverbs::channel::AnyBuffer;
use ibverbs::{ChannelId, Loop, SendWorkRequest, memory::MemorySlice}; //~ ERROR
use ibverbs::{ChannelId, Loop, PooledBuffer, SendWorkRequest}; //~ RIGHT

type Pieces = Vec<MemorySlice<'static, u8>>; //~ ERROR
type Pieces = Vec<PooledBuffer>; //~ RIGHT

pub fn case(clients: &mut Loop<'_, AnyBuffer>, id: ChannelId, pieces: Pieces) {
    let _ = clients.post(id, SendWorkRequest::new(pieces), 0);
}
