use ibverbs::{Channel, TransportResult}; //~ ERROR
use ibverbs::{Channel, Inline, TransportResult}; //~ RIGHT

pub fn case(channel: &mut Channel<'_>, bytes: Box<[u8]>) -> TransportResult<()> {
    channel.send(&bytes).map(drop) //~ ERROR
    channel.send(Inline(&bytes)).map(drop) //~ RIGHT
}
