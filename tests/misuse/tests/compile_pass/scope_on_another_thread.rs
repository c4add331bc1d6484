use ibverbs::{Channel, MemoryRegion, TransportResult};

pub fn case(channel: &mut Channel<'_>, region: &mut MemoryRegion<'_, u8>) -> TransportResult<()> {
    channel.manual_scope(|s| {
        let slice = region.slice(..)?;
        std::thread::scope(|threads| {
            threads.spawn(|| assert_eq!(slice.len(), 8)).join().unwrap();
            s.post_send(slice).unwrap().wait().map(drop)
        })
    })
}
