use ibverbs::{Channel, MemoryRegion, TransportResult};

pub fn case(channel: &mut Channel<'_>, region: &mut MemoryRegion<'_, u8>) -> TransportResult<()> {
    channel.manual_scope(|s| { //~ ERROR
        let send = s.post_send(region.slice(..)?)?; //~ ERROR
        std::thread::scope(|threads| threads.spawn(move || send.wait().map(drop)).join().unwrap()) //~ ERROR
    std::thread::scope(|threads| { //~ RIGHT
        let body = || channel.manual_scope(|s| s.post_send(region.slice(..)?)?.wait().map(drop)); //~ RIGHT
        threads.spawn(body).join().unwrap() //~ RIGHT
    })
}
