use ibverbs::{Channel, MemoryRegion, TransportResult};

pub fn case(channel: &mut Channel<'_>, region: &mut MemoryRegion<'_, u8>) -> TransportResult<()> {
    let mut kept = None; //~ ERROR
    channel.manual_scope(|s| {
        kept = Some(s); //~ ERROR
        s.post_send(region.slice(..)?)?.wait().map(drop) //~ ERROR
        let kept = s; //~ RIGHT
        kept.post_send(region.slice(..)?)?.wait().map(drop) //~ RIGHT
    })
}
