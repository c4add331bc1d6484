use ibverbs::channel::PreparedWindow;
use ibverbs::{Channel, MemorySliceMut, ReceiveWorkRequest, TransportResult}; //~ ERROR
use ibverbs::{Channel, MemorySliceMut, SendWorkRequest, TransportResult}; //~ RIGHT

pub fn case(channel: &mut Channel<'_>, rooms: [MemorySliceMut<'_, u8>; 2]) -> TransportResult<()> {
    channel.manual_scope(|s| {
        let window = PreparedWindow::new(rooms.map(ReceiveWorkRequest::new))?; //~ ERROR
        let window = PreparedWindow::new(rooms.map(SendWorkRequest::new))?; //~ RIGHT
        s.post_window(window)?.wait()?;
        Ok(())
    })
}
