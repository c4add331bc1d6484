use ibverbs::{Channel, SendWorkRequest, TransportResult, memory::MemorySlice};

pub fn case(channel: &mut Channel<'_>, slice: MemorySlice<'_, u8>) -> TransportResult<()> {
    let request = SendWorkRequest::new(slice).immediate(7);
    channel.run(request)?;
    channel.run(slice).map(drop) //~ ERROR
    channel.run(SendWorkRequest::new(slice)).map(drop) //~ RIGHT
}
