use ibverbs::{QueuePair, ReadWorkRequest, RemoteMemoryRegion, Result, ScatterElement, Uc};

pub fn case(
    pair: &mut QueuePair<'_, Uc>,
    into: &mut ScatterElement<'_>,
    remote: RemoteMemoryRegion,
) -> Result<()> {
    unsafe { pair.post(ReadWorkRequest::new(into, remote), 1) }
}

fn main() {}
