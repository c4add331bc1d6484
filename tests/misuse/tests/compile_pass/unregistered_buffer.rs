use ibverbs::{Channel, Inline, TransportResult};

pub fn case(channel: &mut Channel<'_>, bytes: Box<[u8]>) -> TransportResult<()> {
    channel.send(Inline(&bytes)).map(drop)
}
