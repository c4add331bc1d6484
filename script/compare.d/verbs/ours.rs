//! Sends 64 bytes from a queue pair to itself: the same program for each crate. "prepared" sends requests that are made once.

mod common;

use ibverbs::operation::{PreparedReceive, PreparedRequest};
use ibverbs::{Rc, ReceiveWorkRequest, SendWorkRequest, WorkCompletion};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

fn main() -> Result<()> {
    let (what, count) = common::arguments();
    let devices = ibverbs::devices()?;
    let context = devices.iter().next().ok_or("no RDMA device")?.open()?;
    let queue = context.create_cq(16)?;
    let domain = context.alloc_pd()?;
    let pair = || -> Result<_> {
        let builder = domain.create_qp(&queue, &queue, Rc).gid_index(1);
        let prepared = builder.max_send_wr(16).max_recv_wr(16).build()?;
        let endpoint = prepared.endpoint();
        Ok(prepared.handshake(endpoint)?)
    };
    match &*what {
        "pair" => (0..count).try_for_each(|_| pair().map(drop))?,
        "keep" => {
            let _pairs = (0..count).map(|_| pair()).collect::<Result<Vec<_>>>()?;
            common::print_heap();
        }
        _ => {
            let mut queue_pair = pair()?;
            let sent = domain.allocate::<u64>(8)?;
            let mut received = domain.allocate::<u64>(8)?;
            let mut completions = [WorkCompletion::default(); 16];
            let mut poll = |mut left| -> Result<()> {
                while left > 0 {
                    for completion in queue.poll(&mut completions)? {
                        completion.result()?;
                        left -= 1;
                    }
                }
                Ok(())
            };
            if what == "send" {
                for _ in 0..count {
                    // SAFETY: both regions outlive the requests, and no code touches them until both completions were polled.
                    unsafe {
                        queue_pair.post_receive(&mut received, .., 2)?;
                        queue_pair.post_send(&sent, .., 1)?;
                    }
                    poll(2)?;
                }
                return Ok(());
            }
            let elements = [sent.gather_element(..)?];
            let mut request = PreparedRequest::new(SendWorkRequest::new(&elements), 0)?;
            let mut whole = received.slice_mut(..)?;
            let mut elements = [whole.scatter_element()?];
            let mut receive = PreparedReceive::new(ReceiveWorkRequest::new(&mut elements))?;
            for _ in 0..count {
                // SAFETY: as above.
                unsafe {
                    queue_pair.post_prepared(&mut receive, 2)?;
                    queue_pair.post_prepared(&mut request, 1)?;
                }
                poll(2)?;
            }
        }
    }
    Ok(())
}
