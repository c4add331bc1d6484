use ibverbs::operation::FlushWorkRequest;
use ibverbs::queue_pair::FlushPlacement;
use ibverbs::{Channel, QueuePair, RemoteMemoryRegion, Result};

pub unsafe fn case(
    channel: &mut Channel<'_>,
    queue_pair: &mut QueuePair<'_>,
    remote: RemoteMemoryRegion,
) -> Result<()> {
    let flush = FlushWorkRequest::new(remote, FlushPlacement::GLOBAL);
    let _ = (&channel, &queue_pair);
    let _ = channel.run(flush); //~ ERROR
    Ok(()) //~ ERROR
    unsafe { queue_pair.batch(|batch| batch.add(flush, 1)) } //~ RIGHT
}
