use ibverbs::{Channel, PooledBuffer, TransportResult};

pub fn case(channel: &mut Channel<'_>, mut buffer: PooledBuffer) -> TransportResult<u8> {
    channel.manual_scope(|s| {
        let receive = s.post_receive(&mut buffer)?;
        let first = buffer[0]; //~ ERROR
        receive.wait()?; //~ ERROR
        Ok(first) //~ ERROR
        let (buffer, _) = receive.wait()?; //~ RIGHT
        Ok(buffer[0]) //~ RIGHT
    })
}
