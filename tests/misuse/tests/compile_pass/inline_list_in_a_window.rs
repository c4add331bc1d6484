use ibverbs::{Channel, Inline, SendWorkRequest, TransportResult};

pub fn case(channel: &mut Channel<'_>, bytes: &[u8]) -> TransportResult<()> {
    channel.manual_scope(|s| {
        s.post_window([SendWorkRequest::new(Inline(bytes))])?.wait()?;
        Ok(())
    })
}
