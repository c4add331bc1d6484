//! Sends a greeting over RDMA, from a channel to itself. Not a line of it is unsafe.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // Where there is no RDMA device, one made of software.
    let _software = ibverbs_software::register_if_none()?;
    let devices = ibverbs::devices()?;
    let device = devices.iter().next().ok_or("this machine has no RDMA device")?;
    let context = device.open()?;
    let domain = context.alloc_pd()?;

    let prepared = domain.create_channel().build()?;
    let remote = prepared.endpoint(); // a peer would send us its own, over TCP or otherwise
    let mut channel = prepared.handshake(remote)?;

    // Memory that the device can reach; it belongs to the device only while an operation runs.
    let mut region = domain.allocate::<u8>(64)?;
    region[..12].copy_from_slice(b"hello, RDMA!");
    let (greeting, room) = region.slice_mut(..)?.split_at(12)?;
    channel.scope(|scope| {
        let receive = scope.post_receive(room)?;
        scope.post_send(greeting)?.wait()?;
        let (message, completion) = receive.wait()?;
        let length = completion.byte_len() as usize;
        println!("{}", String::from_utf8_lossy(&message[..length]));
        Ok::<(), ibverbs::TransportError>(())
    })?;
    Ok(())
}
