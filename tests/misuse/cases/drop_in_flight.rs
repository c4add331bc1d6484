use ibverbs::{Channel, MemoryRegion, TransportResult};

type Region<'a> = Option<MemoryRegion<'a, u8>>;

pub fn case(channel: &mut Channel<'_>, region: &mut Region<'_>) -> TransportResult<()> {
    channel.manual_scope(|s| {
        let send = s.post_send(region.as_ref().unwrap().slice(..)?)?;
        drop(region.take()); //~ ERROR
        send.wait().map(drop)
    }) //~ ERROR
    })?; //~ RIGHT
    drop(region.take()); //~ RIGHT
    Ok(()) //~ RIGHT
}
