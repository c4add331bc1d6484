use ibverbs::{Channel, MemoryRegion, TransportResult};

pub fn case(channel: &mut Channel<'_>, region: Box<MemoryRegion<'_, u8>>) -> TransportResult<()> {
    let mut work = channel.post_receive_owned(region)?;
    Ok(work.wait(channel).map(drop)?)
}

fn main() {}
