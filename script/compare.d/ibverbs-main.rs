// Sends 8 bytes from a queue pair to itself: the same program for each crate.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let context = ibverbs::devices()?.iter().next().ok_or("no RDMA device")?.open()?;
    let queue = context.create_cq(16).build()?;
    let domain = context.alloc_pd()?;
    let prepared = domain
        .create_qp(&queue, &queue, ibverbs::ibv_qp_type::IBV_QPT_RC)?
        .set_gid_index(1)
        .build()?;
    let endpoint = prepared.endpoint()?;
    let mut queue_pair = prepared.handshake(endpoint)?;
    let mut sent = domain.allocate(8)?;
    let mut received = domain.allocate(8)?;
    sent.bytes_mut()[0] = 0x42;
    unsafe {
        queue_pair.post_receive(&[received.slice(..)], 2)?;
        queue_pair.post_send(&[sent.slice(..)], 1)?;
    }
    let mut left = 2;
    while left > 0 {
        let Some(mut completions) = queue.poll()? else { continue };
        while let Some(completion) = completions.next() {
            assert!(completion.ok().is_ok());
            left -= 1;
        }
    }
    assert_eq!(received.bytes_mut()[0], 0x42);
    println!("received");
    Ok(())
}
