//! Sends 64 bytes from a queue pair to itself: the same program for each crate. (This one connects by LID alone: grh.c adds the GID.)

mod common;

use ibverbs_rs::ibverbs;
use ibverbs_rs::ibverbs::access_config::AccessFlags;
use ibverbs_rs::ibverbs::completion_queue::PollSlot;
use ibverbs_rs::ibverbs::queue_pair::QueuePair;
use ibverbs_rs::ibverbs::work::{ReceiveWorkRequest, SendWorkRequest};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (what, count) = common::arguments();
    let devices = ibverbs::list_devices()?;
    let context = devices.iter().next().ok_or("no RDMA device")?.open()?;
    let queue = context.create_cq(16)?;
    let domain = context.allocate_pd()?;
    let pair = || {
        let prepared = QueuePair::builder()
            .pd(&domain)
            .send_cq(&queue)
            .recv_cq(&queue)
            .access(AccessFlags::new())
            .max_send_sge(1)
            .max_recv_sge(1)
            .build()?;
        let endpoint = prepared.endpoint();
        prepared.handshake(endpoint)
    };
    match &*what {
        "pair" => (0..count).try_for_each(|_| pair().map(drop))?,
        "keep" => {
            let _pairs = (0..count).map(|_| pair()).collect::<Result<Vec<_>, _>>()?;
            common::print_heap();
        }
        _ => {
            let mut queue_pair = pair()?;
            let (sent, mut received) = ([0x42_u8; 64], [0_u8; 64]);
            let source = domain.register_local_mr_slice(&sent)?;
            let target = domain.register_local_mr_slice(&received)?;
            let mut completions = [PollSlot::default(); 16];
            for _ in 0..count {
                unsafe {
                    let mut elements = [target.scatter_element_unchecked(&mut received)];
                    queue_pair.post_receive(ReceiveWorkRequest::new(&mut elements), 2)?;
                    let elements = [source.gather_element_unchecked(&sent)];
                    queue_pair.post_send(SendWorkRequest::new(&elements), 1)?;
                }
                let mut left = 2;
                while left > 0 {
                    for completion in queue.poll(&mut completions)? {
                        completion.result()?;
                        left -= 1;
                    }
                }
            }
        }
    }
    Ok(())
}
