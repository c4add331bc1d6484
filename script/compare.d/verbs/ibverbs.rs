//! Sends 64 bytes from a queue pair to itself: the same program for each crate.

mod common;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (what, count) = common::arguments();
    let devices = ibverbs::devices()?;
    let context = devices.iter().next().ok_or("no RDMA device")?.open()?;
    let queue = context.create_cq(16, 0)?;
    let domain = context.alloc_pd()?;
    let pair = || {
        let prepared = domain
            .create_qp(&queue, &queue, ibverbs::ibv_qp_type::IBV_QPT_RC)
            .set_gid_index(1)
            .set_max_send_wr(16)
            .set_max_recv_wr(16)
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
            let mut sent = domain.allocate::<u64>(8)?;
            let mut received = domain.allocate::<u64>(8)?;
            let mut completions = [ibverbs::ibv_wc::default(); 16];
            for _ in 0..count {
                unsafe {
                    queue_pair.post_receive(&mut received, .., 2)?;
                    queue_pair.post_send(&mut sent, .., 1)?;
                }
                let mut left = 2;
                while left > 0 {
                    for completion in queue.poll(&mut completions)? {
                        assert!(completion.is_valid());
                        left -= 1;
                    }
                }
            }
        }
    }
    Ok(())
}
