use ibverbs::{Channel, MemoryRegion, TransportResult};

pub fn case(channel: &mut Channel<'_>, region: &mut MemoryRegion<'_, u8>) -> TransportResult<()> {
    channel.manual_scope(|s| {
        let send = s.post_send(region.slice(..)?)?;
        std::thread::scope(|threads| threads.spawn(move || send.wait().map(drop)).join().unwrap())
    })
}

fn main() {}
