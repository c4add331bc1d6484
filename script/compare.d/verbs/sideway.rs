//! Sends 64 bytes from a queue pair to itself: the same program for each crate.

mod common;

use sideway::ibverbs::AccessFlags;
use sideway::ibverbs::address::AddressHandleAttribute;
use sideway::ibverbs::completion::GenericCompletionQueue;
use sideway::ibverbs::device::DeviceList;
use sideway::ibverbs::device_context::Mtu;
use sideway::ibverbs::queue_pair::{
    PostSendGuard, QueuePair, QueuePairAttribute, QueuePairState, SetScatterGatherEntry,
    WorkRequestFlags,
};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

fn main() -> Result<()> {
    let (what, count) = common::arguments();
    let devices = DeviceList::new()?;
    let context = devices.iter().next().ok_or("no RDMA device")?.open()?;
    let queue = GenericCompletionQueue::from(context.create_cq_builder().setup_cqe(16).build()?);
    let domain = context.alloc_pd()?;
    let pair = || -> Result<_> {
        let mut queue_pair = domain
            .create_qp_builder()
            .setup_max_send_wr(16)
            .setup_max_recv_wr(16)
            .setup_send_cq(queue.clone())
            .setup_recv_cq(queue.clone())
            .build()?;
        let gid = context.query_gid(1, 1)?;
        let mut attributes = QueuePairAttribute::new();
        attributes
            .setup_state(QueuePairState::Init)
            .setup_pkey_index(0)
            .setup_port(1)
            .setup_access_flags(AccessFlags::LocalWrite);
        queue_pair.modify(&attributes)?;
        let mut path = AddressHandleAttribute::new();
        path.setup_dest_lid(0)
            .setup_port(1)
            .setup_service_level(0)
            .setup_grh_src_gid_index(1)
            .setup_grh_dest_gid(&gid)
            .setup_grh_hop_limit(64);
        let mut attributes = QueuePairAttribute::new();
        attributes
            .setup_state(QueuePairState::ReadyToReceive)
            .setup_path_mtu(Mtu::Mtu1024)
            .setup_dest_qp_num(queue_pair.qp_number())
            .setup_rq_psn(0)
            .setup_max_dest_read_atomic(1)
            .setup_min_rnr_timer(12)
            .setup_address_vector(&path);
        queue_pair.modify(&attributes)?;
        let mut attributes = QueuePairAttribute::new();
        attributes
            .setup_state(QueuePairState::ReadyToSend)
            .setup_sq_psn(0)
            .setup_timeout(14)
            .setup_retry_cnt(6)
            .setup_rnr_retry(6)
            .setup_max_read_atomic(1);
        queue_pair.modify(&attributes)?;
        Ok(queue_pair)
    };
    match &*what {
        "pair" => (0..count).try_for_each(|_| pair().map(drop))?,
        "keep" => {
            let _pairs = (0..count).map(|_| pair()).collect::<Result<Vec<_>>>()?;
            common::print_heap();
        }
        _ => {
            let mut queue_pair = pair()?;
            let (sent, mut received) = ([0x42_u8; 64], [0_u8; 64]);
            let access = AccessFlags::LocalWrite;
            let source = unsafe { domain.reg_mr(sent.as_ptr() as _, sent.len(), access)? };
            let target =
                unsafe { domain.reg_mr(received.as_mut_ptr() as _, received.len(), access)? };
            for _ in 0..count {
                let mut post = queue_pair.start_post_recv();
                unsafe {
                    post.construct_wr(2).setup_sge(target.lkey(), received.as_mut_ptr() as _, 64);
                }
                post.post()?;
                let mut post = queue_pair.start_post_send();
                let request = post.construct_wr(1, WorkRequestFlags::Signaled).setup_send();
                unsafe { request.setup_sge(source.lkey(), sent.as_ptr() as _, 64) };
                post.post()?;
                let mut left = 2;
                while left > 0 {
                    let Ok(mut poller) = queue.start_poll() else { continue };
                    while let Some(completion) = poller.next() {
                        assert_eq!(completion.status(), 0);
                        left -= 1;
                    }
                }
            }
        }
    }
    Ok(())
}
