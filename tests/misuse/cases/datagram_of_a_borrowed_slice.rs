use ibverbs::{ChannelId, Loop, PooledBuffer, memory::MemorySlice, operation::DatagramDestination}; //~ ERROR
use ibverbs::{ChannelId, Loop, PooledBuffer, operation::DatagramDestination}; //~ RIGHT

type Here<'a> = (&'a mut Loop<'a, PooledBuffer>, ChannelId, DatagramDestination);

pub fn case((here, end, to): Here<'_>, message: MemorySlice<'_, u8>) { //~ ERROR
pub fn case((here, end, to): Here<'_>, message: PooledBuffer) { //~ RIGHT
    let _ = here.send_to(end, message, &to, 0);
}
