use ibverbs::{QueuePair, Rc, ReadWorkRequest, RemoteMemoryRegion, Result, ScatterElement};

pub fn case(
    pair: &mut QueuePair<'_, Rc>,
    into: &mut ScatterElement<'_>,
    remote: RemoteMemoryRegion,
) -> Result<()> {
    unsafe { pair.post(ReadWorkRequest::new(into, remote), 1) }
}
