// Sends 8 bytes from a queue pair to itself: the same program for each crate. (This one connects by
// LID alone, so it is for InfiniBand only.)

use ibverbs_rs::ibverbs;
use ibverbs_rs::ibverbs::access_config::AccessFlags;
use ibverbs_rs::ibverbs::completion_queue::PollSlot;
use ibverbs_rs::ibverbs::queue_pair::QueuePair;
use ibverbs_rs::ibverbs::work::{ReceiveWorkRequest, SendWorkRequest};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let devices = ibverbs::list_devices()?;
    let context = devices.iter().next().ok_or("no RDMA device")?.open()?;
    let queue = context.create_cq(16)?;
    let domain = context.allocate_pd()?;
    let prepared = QueuePair::builder()
        .pd(&domain)
        .send_cq(&queue)
        .recv_cq(&queue)
        .access(AccessFlags::new())
        .build()?;
    let endpoint = prepared.endpoint();
    let mut queue_pair = prepared.handshake(endpoint)?;
    let (sent, mut received) = ([0x42_u8; 8], [0_u8; 8]);
    let source = domain.register_local_mr_slice(&sent)?;
    let target = domain.register_local_mr_slice(&received)?;
    unsafe {
        let mut elements = [target.scatter_element_unchecked(&mut received)];
        queue_pair.post_receive(ReceiveWorkRequest::new(&mut elements), 2)?;
        let elements = [source.gather_element_unchecked(&sent)];
        queue_pair.post_send(SendWorkRequest::new(&elements), 1)?;
    }
    let (mut left, mut completions) = (2, [PollSlot::default(); 16]);
    while left > 0 {
        for completion in queue.poll(&mut completions)? {
            completion.result()?;
            left -= 1;
        }
    }
    assert_eq!(received, sent);
    println!("received");
    Ok(())
}
