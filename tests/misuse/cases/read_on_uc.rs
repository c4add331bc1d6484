use ibverbs::{QueuePair, ReadWorkRequest, RemoteMemoryRegion, Result, Uc, memory::ScatterElement}; //~ ERROR
use ibverbs::{QueuePair, Rc, ReadWorkRequest, RemoteMemoryRegion, Result, memory::ScatterElement}; //~ RIGHT

pub fn case(
    pair: &mut QueuePair<'_, Uc>, //~ ERROR
    pair: &mut QueuePair<'_, Rc>, //~ RIGHT
    into: &mut ScatterElement<'_>,
    remote: RemoteMemoryRegion,
) -> Result<()> {
    unsafe { pair.post(ReadWorkRequest::new(into, remote), 1) }
}
