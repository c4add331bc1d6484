use ibverbs::{Channel, TransportResult};

pub fn case(channel: &mut Channel<'_>, bytes: Box<[u8]>) -> TransportResult<()> {
    channel.send_inline(&bytes).map(drop)
}
