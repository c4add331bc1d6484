use ibverbs::operation::FlushWorkRequest;
use ibverbs::queue_pair::FlushPlacement;
use ibverbs::{QueuePair, RemoteMemoryRegion, Result};

pub fn case(pair: &mut QueuePair<'_>, remote: RemoteMemoryRegion) -> Result<()> {
    unsafe { pair.post(FlushWorkRequest::new(remote, FlushPlacement::GLOBAL), 1) } //~ ERROR
    unsafe { pair.batch(|b| b.add(FlushWorkRequest::new(remote, FlushPlacement::GLOBAL), 1)) } //~ RIGHT
}
