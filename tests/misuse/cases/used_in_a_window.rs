use ibverbs::channel::PreparedWindow;
use ibverbs::{Channel, MemoryRegion, SendWorkRequest, TransportResult};

pub fn case(channel: &mut Channel<'_>, region: &mut MemoryRegion<'_, u8>) -> TransportResult<u8> {
    channel.manual_scope(|s| {
        let (one, two) = region.slice_mut(..)?.split_at(8)?;
        let prepared = PreparedWindow::new([SendWorkRequest::new(one), SendWorkRequest::new(two)])?;
        let window = s.post_window(prepared)?;
        let first = one[0]; //~ ERROR
        window.wait()?; //~ ERROR
        let window = window.wait()?.0; //~ RIGHT
        let first = window.buffers()[0][0]; //~ RIGHT
        Ok(first)
    })
}
