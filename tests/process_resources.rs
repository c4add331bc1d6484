//! The RDMA resources of a process, on a device of software. It is a separate program, because other tests
//! would hold resources too.

#[path = "support/software.rs"]
mod software;

use ibverbs::device::{ProcessResources, process_resources};
use ibverbs::{Rc, SharedReceiveQueue};
use ibverbs_software::Verb;
use software::Software;

fn held() -> [usize; 6] {
    let ProcessResources {
        contexts,
        protection_domains,
        completion_queues,
        queue_pairs,
        shared_receive_queues,
        memory_regions,
        ..
    } = process_resources().unwrap();
    [
        contexts,
        protection_domains,
        completion_queues,
        queue_pairs,
        shared_receive_queues,
        memory_regions,
    ]
}

#[test]
fn objects_count_until_they_are_destroyed() {
    assert_eq!(held(), [0; 6]);
    let device = Software::new();
    {
        let context = device.context();
        let domain = context.alloc_pd().unwrap();
        let queue = context.create_cq(8).unwrap();
        let region = domain.allocate::<u8>(100).unwrap();
        let receives = SharedReceiveQueue::new(&domain, 8, 1).unwrap();
        let create = || domain.create_qp(&queue, &queue, Rc).build().unwrap();
        let queue_pairs = [create(), create()];
        assert_eq!(held(), [1, 1, 1, 2, 1, 1]);
        region.close().unwrap();
        receives.close().unwrap();
        drop(queue_pairs);
        assert_eq!(held(), [1, 1, 1, 0, 0, 0]);
        device.fail_next(Verb::CreateQp, libc::ENOMEM);
        let refused = domain.create_qp(&queue, &queue, Rc).build();
        assert!(refused.is_err());
        assert_eq!(held(), [1, 1, 1, 0, 0, 0], "what was never made does not count");
    }
    assert_eq!(held(), [0; 6]);

    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(8).unwrap();
    std::mem::forget(domain.allocate::<u8>(100).unwrap());
    assert_eq!(held(), [1, 1, 1, 0, 0, 1], "what was forgotten is still held");
    device.fail_next(Verb::DestroyCq, libc::EIO);
    assert!(queue.close().is_err());
    assert_eq!(held(), [1, 1, 1, 0, 0, 1], "what could not be destroyed is leaked, and held");
}
