use ibverbs::{Channel, MemoryRegion, TransportResult};

pub fn case(channel: &mut Channel<'_>, region: &mut MemoryRegion<'_, u8>) -> TransportResult<()> {
    std::thread::scope(|threads| {
        let body = || channel.manual_scope(|s| s.post_send(region.slice(..)?)?.wait().map(drop));
        threads.spawn(body).join().unwrap()
    })
}
