use ibverbs::{Channel, MemoryRegion, TransportResult};

pub fn case(channel: &mut Channel<'_>, region: &mut MemoryRegion<'_, u8>) -> TransportResult<()> {
    channel.manual_scope(|s| {
        let (one, two) = region.slice_mut(..)?.split_at(4)?;
        let receive = s.post_receive(one)?;
        assert_eq!(one[0], two[0]); //~ ERROR
        assert_eq!(two[0], 0); //~ RIGHT
        receive.wait().map(drop)
    })
}
