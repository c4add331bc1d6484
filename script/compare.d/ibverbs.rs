// Sends 8 bytes from a queue pair to itself: the same program for each crate.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let devices = ibverbs::devices()?;
    let context = devices.iter().next().ok_or("no RDMA device")?.open()?;
    let queue = context.create_cq(16, 0)?;
    let domain = context.alloc_pd()?;
    let prepared = domain
        .create_qp(&queue, &queue, ibverbs::ibv_qp_type::IBV_QPT_RC)
        .set_gid_index(1)
        .build()?;
    let endpoint = prepared.endpoint();
    let mut queue_pair = prepared.handshake(endpoint)?;
    let mut sent = domain.allocate::<u64>(1)?;
    let mut received = domain.allocate::<u64>(1)?;
    sent[0] = 0x42;
    unsafe {
        queue_pair.post_receive(&mut received, .., 2)?;
        queue_pair.post_send(&mut sent, .., 1)?;
    }
    let (mut left, mut completions) = (2, [ibverbs::ibv_wc::default(); 16]);
    while left > 0 {
        for completion in queue.poll(&mut completions)? {
            assert!(completion.is_valid());
            left -= 1;
        }
    }
    assert_eq!(received[0], 0x42);
    println!("received");
    Ok(())
}
