use ibverbs::{Channel, MemoryRegion, TransportResult};

pub fn case(channel: &mut Channel<'_>, region: MemoryRegion<'_, u8>) -> TransportResult<()> {
    let slice = region.slice(..)?;
    channel.manual_scope(|s| {
        let send = s.post_send(slice)?;
        region.close().unwrap(); //~ ERROR
        send.wait().map(drop)
    }) //~ ERROR
    })?; //~ RIGHT
    region.close().unwrap(); //~ RIGHT
    Ok(()) //~ RIGHT
}
