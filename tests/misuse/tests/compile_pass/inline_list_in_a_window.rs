use ibverbs::{Channel, Inline, PreparedWindow, SendWorkRequest, TransportResult};

pub fn case(channel: &mut Channel<'_>, bytes: &[u8]) -> TransportResult<()> {
    channel.manual_scope(|s| {
        let window = PreparedWindow::new([SendWorkRequest::new(Inline(bytes))])?;
        s.post_window(window)?.wait()?;
        Ok(())
    })
}
