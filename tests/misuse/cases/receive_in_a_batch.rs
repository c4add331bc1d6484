use ibverbs::{QueuePair, ReceiveWorkRequest, Result, memory::ScatterElement};

pub fn case(pair: &mut QueuePair<'_>, into: &mut ScatterElement<'_>) -> Result<()> {
    unsafe { pair.batch(|b| b.add(ReceiveWorkRequest::new(into), 1)) } //~ ERROR
    unsafe { pair.post(ReceiveWorkRequest::new(into), 1) } //~ RIGHT
}
