use ibverbs::{MemoryRegion, QueuePair, Result, SendWorkRequest};

pub fn case(pair: &mut QueuePair<'_>, region: MemoryRegion<'_, u8>) -> Result<()> {
    let element = [region.gather_element(..)?];
    let request = SendWorkRequest::new(&element);
    unsafe { pair.post(request, 1) }?; //~ RIGHT
    drop(region);
    unsafe { pair.post(request, 1) } //~ ERROR
    Ok(()) //~ RIGHT
}
