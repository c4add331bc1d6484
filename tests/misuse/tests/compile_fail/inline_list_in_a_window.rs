use std::io::IoSlice;

use ibverbs::{Channel, InlineList, PreparedWindow, SendWorkRequest, TransportResult};

pub fn case(channel: &mut Channel<'_>, bytes: &[u8]) -> TransportResult<()> {
    channel.manual_scope(|s| {
        let window =
            PreparedWindow::new([SendWorkRequest::new(InlineList(&[IoSlice::new(bytes)]))])?;
        s.post_window(window)?.wait()?;
        Ok(())
    })
}

fn main() {}
