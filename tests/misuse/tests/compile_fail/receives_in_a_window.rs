use ibverbs::{Channel, MemorySliceMut, ReceiveWorkRequest, TransportResult};

pub fn case(channel: &mut Channel<'_>, rooms: [MemorySliceMut<'_, u8>; 2]) -> TransportResult<()> {
    channel.manual_scope(|s| {
        s.post_window(rooms.map(ReceiveWorkRequest::new))?.wait()?;
        Ok(())
    })
}

fn main() {}
