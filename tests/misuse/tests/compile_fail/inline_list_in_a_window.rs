use std::io::IoSlice;

use ibverbs::{Channel, InlineList, SendWorkRequest, TransportResult};

pub fn case(channel: &mut Channel<'_>, bytes: &[u8]) -> TransportResult<()> {
    channel.manual_scope(|s| {
        s.post_window([SendWorkRequest::new(InlineList(&[IoSlice::new(bytes)]))])?.wait()?;
        Ok(())
    })
}

fn main() {}
