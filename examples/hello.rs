//! Sends a greeting over RDMA between two threads, which connect over TCP. Nothing is unsafe.

fn main() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let _software = ibverbs_software::register_if_none()?; // a device, if the machine has none
    let context = ibverbs::open_first()?;
    let domain = context.alloc_pd()?;
    let prepare = || domain.create_channel().max_inline_data(12).build();
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
    let listener = std::net::TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    std::thread::scope(|threads| {
        // The peer, which is usually on another machine.
        let peer = threads.spawn(|| {
            let (mut channel, _) = prepare()?.connect(address, b"", deadline)?;
            channel.until(deadline).send(ibverbs::Inline(b"hello, RDMA!"))?;
            Ok(())
        });
        // Memory that the device can reach. It has it only while an operation runs.
        let mut region = domain.allocate::<u8>(64)?;
        let (mut channel, _) = prepare()?.accept(&listener, b"", deadline)?;
        let received = channel.until(deadline).receive(&mut region.slice_mut(..)?)?;
        println!("{}", String::from_utf8_lossy(&region[..received.byte_len() as usize]));
        peer.join().map_err(|_| "the peer has panicked")?
    })
}
