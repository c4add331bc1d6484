use ibverbs::{Channel, MemoryRegion, TransportResult};

pub fn case(channel: &mut Channel<'_>, region: &mut MemoryRegion<'_, u8>) -> TransportResult<()> {
    channel.manual_scope(|s| {
        let slice = region.slice(..)?;
        std::thread::scope(|threads| {
            threads.spawn(|| s.post_send(slice).unwrap().wait().map(drop)).join().unwrap() //~ ERROR
            threads.spawn(|| assert_eq!(slice.len(), 8)).join().unwrap(); //~ RIGHT
            s.post_send(slice).unwrap().wait().map(drop) //~ RIGHT
        })
    })
}
