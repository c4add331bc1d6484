use ibverbs::{QueuePair, Result, SendWorkRequest, memory::GatherElement, operation::PreparedRequest};

pub unsafe fn case(queue_pair: &mut QueuePair<'_>, element: GatherElement<'_>) -> Result<()> {
    let elements = Box::new([element]);
    let mut request = PreparedRequest::new(SendWorkRequest::new(&*elements), 0)?;
    drop(elements); //~ ERROR
    unsafe { queue_pair.post_prepared(&mut request, 1) }
}
