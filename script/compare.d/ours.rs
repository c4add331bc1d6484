// Sends 8 bytes from a queue pair to itself: the same program for each crate.

use ibverbs::{Rc, WorkCompletion};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let devices = ibverbs::devices()?;
    let context = devices.iter().next().ok_or("no RDMA device")?.open()?;
    let queue = context.create_cq(16)?;
    let domain = context.alloc_pd()?;
    let prepared =
        domain.create_qp(&queue, &queue, Rc).gid_index(1).build()?;
    let endpoint = prepared.endpoint();
    let mut queue_pair = prepared.handshake(endpoint)?;
    let mut sent = domain.allocate::<u64>(1)?;
    let mut received = domain.allocate::<u64>(1)?;
    sent[0] = 0x42;
    // SAFETY: both regions outlive the requests, and no code touches them until both completions were polled.
    unsafe {
        queue_pair.post_receive(&mut received, .., 2)?;
        queue_pair.post_send(&sent, .., 1)?;
    }
    let (mut left, mut completions) = (2, [WorkCompletion::default(); 16]);
    while left > 0 {
        for completion in queue.poll(&mut completions)? {
            completion.result()?;
            left -= 1;
        }
    }
    assert_eq!(received[0], 0x42);
    println!("received");
    Ok(())
}
