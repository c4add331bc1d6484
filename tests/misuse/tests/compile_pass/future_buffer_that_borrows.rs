use ibverbs::channel::AnyBuffer;
use ibverbs::future::Local;
use ibverbs::{AsyncChannel, MemoryRegion};

pub fn case(channel: &AsyncChannel<Local<AnyBuffer>>, region: Box<MemoryRegion<'static, u8>>) -> usize {
    let sending = channel.send(region);
    size_of_val(&sending)
}
