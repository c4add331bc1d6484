use ibverbs::{Channel, MemoryRegion, SendWorkRequest, TransportResult};

pub fn case(channel: &mut Channel<'_>, region: &mut MemoryRegion<'_, u8>) -> TransportResult<()> {
    channel.manual_scope(|s| {
        let (mut one, two) = region.slice_mut(..)?.split_at(8)?;
        let window = s.post_window([SendWorkRequest::new(one), SendWorkRequest::new(two)])?;
        let ([mut one, _two], _) = window.wait()?;
        one.fill(0);
        Ok(())
    })
}
