use ibverbs::channel::AnyBuffer;
use ibverbs::future::Local;
use ibverbs::{AsyncChannel, MemoryRegion};

pub fn case(channel: &AsyncChannel<Local<AnyBuffer>>, region: Box<MemoryRegion<'_, u8>>) -> usize { //~ ERROR
pub fn case(channel: &AsyncChannel<Local<AnyBuffer>>, region: Box<MemoryRegion<'static, u8>>) -> usize { //~ RIGHT
    let sending = channel.send(region);
    size_of_val(&sending)
}
