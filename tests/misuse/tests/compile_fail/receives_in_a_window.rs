use ibverbs::channel::PreparedWindow;
use ibverbs::{Channel, MemorySliceMut, ReceiveWorkRequest, TransportResult};

pub fn case(channel: &mut Channel<'_>, rooms: [MemorySliceMut<'_, u8>; 2]) -> TransportResult<()> {
    channel.manual_scope(|s| {
        let window = PreparedWindow::new(rooms.map(ReceiveWorkRequest::new))?;
        s.post_window(window)?.wait()?;
        Ok(())
    })
}

fn main() {}
