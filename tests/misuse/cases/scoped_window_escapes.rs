use ibverbs::channel::PreparedWindow;
use ibverbs::{Channel, MemoryRegion, SendWorkRequest, TransportResult};

pub fn case(channel: &mut Channel<'_>, region: &mut MemoryRegion<'_, u8>) -> TransportResult<()> {
    let mut kept = None;
    channel.manual_scope(|s| {
        let window = PreparedWindow::new([SendWorkRequest::new(region.slice(..)?)])?;
        kept = Some(s.post_window(window)?); //~ ERROR
        kept = Some(s.post_window(window)?.wait()?); //~ RIGHT
        Ok(())
    })
}
