use ibverbs::{ChannelId, DatagramDestination, Loop, MemorySlice, PooledBuffer}; //~ ERROR
use ibverbs::{ChannelId, DatagramDestination, Loop, PooledBuffer}; //~ RIGHT

type Here<'a> = (&'a mut Loop<'a, PooledBuffer>, ChannelId, DatagramDestination);

pub fn case((here, end, to): Here<'_>, message: MemorySlice<'_, u8>) { //~ ERROR
pub fn case((here, end, to): Here<'_>, message: PooledBuffer) { //~ RIGHT
    let _ = here.send_to(end, message, &to, 0);
}
