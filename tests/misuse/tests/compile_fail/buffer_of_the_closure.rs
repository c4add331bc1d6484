use ibverbs::{Channel, MemoryRegion, TransportResult};

pub fn case(channel: &mut Channel<'_>, region: &mut MemoryRegion<'_, u8>) -> TransportResult<()> {
    let domain = region.protection_domain();
    channel.manual_scope(|s| {
        let local = domain.allocate::<u8>(8)?;
        s.post_send(local.slice(..)?)?.wait()?;
        Ok(())
    })
}

fn main() {}
