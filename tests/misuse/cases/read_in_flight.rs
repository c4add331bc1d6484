use ibverbs::{Channel, MemoryRegion, TransportResult};

pub fn case(channel: &mut Channel<'_>, region: &mut MemoryRegion<'_, u8>) -> TransportResult<()> {
    channel.manual_scope(|s| {
        let receive = s.post_receive(region.slice_mut(..)?)?;
        assert_eq!(region[0], 1); //~ ERROR
        receive.wait().map(drop) //~ ERROR
        let (received, _) = receive.wait()?; //~ RIGHT
        assert_eq!(received[0], 1); //~ RIGHT
        Ok(()) //~ RIGHT
    })
}
