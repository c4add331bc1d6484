//! Objects come and go, up to the limits that the device names.

use ibverbs::completion::CompletionFields;
use ibverbs::queue_pair::SendOperations;
use ibverbs::{CompletionQueue, ErrorKind, Rc, Uc, Ud};

use crate::device::{has_reliable, open, reliable, supported};
use crate::transport::nothing_is_left;

#[test]
fn come_and_go() {
    {
        let context = open();
        let limits = context.query_device().unwrap();
        let reliable_exists = has_reliable(&context);
        for _ in 0..10 {
            let domain = context.alloc_pd().unwrap();
            let queue = context.create_cq(limits.max_cqe().min(64)).unwrap();
            let region = domain.allocate::<u8>(4096).unwrap();
            let mut pairs = Vec::new();
            for _ in 0..if reliable_exists { limits.max_qp().min(16) } else { 0 } {
                match reliable(&domain, &queue).build() {
                    Ok(pair) => pairs.push(pair),
                    // Others may have some of them.
                    Err(error) if error.kind() == ErrorKind::Resource => break,
                    Err(error) => panic!("{error}"),
                }
            }
            drop(pairs);
            region.close().unwrap();
            queue.close().unwrap();
            domain.close().unwrap();
        }
    }
    nothing_is_left();
}

#[test]
fn beyond_a_limit_are_refused() {
    let context = open();
    let limits = context.query_device().unwrap();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(4).unwrap();
    if let Some(more) = limits.max_cqe().checked_add(1) {
        let error = context.create_cq(more).map(drop).unwrap_err();
        assert!(error.to_string().contains(&limits.max_cqe().to_string()), "{error}");
    }
    let more = limits.max_qp_wr().saturating_add(1);
    let error =
        domain.create_qp(&queue, &queue, Rc).max_send_wr(more).build().map(drop).unwrap_err();
    assert!(!error.to_string().is_empty());
    let more = limits.max_sge().saturating_add(1000);
    let error = domain.create_qp(&queue, &queue, Rc).max_send_sge(more).build().map(drop);
    error.unwrap_err();
    // All of these were refused, and nothing is left of them.
    assert_eq!(ibverbs::device::process_resources().unwrap().queue_pairs, 0);
}

#[test]
fn exist_of_these_types() {
    let context = open();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(4).unwrap();
    supported("RC", domain.create_qp(&queue, &queue, Rc).build());
    supported("UC", domain.create_qp(&queue, &queue, Uc).build());
    supported("UD", domain.create_qp(&queue, &queue, Ud).build());
    let extended = reliable(&domain, &queue).extended(SendOperations::SEND);
    supported("ibv_wr_*", extended.build());
    let queue = CompletionQueue::builder(&context, 4).extended(CompletionFields::STANDARD);
    supported("ibv_create_cq_ex", queue.build());
    if context.query_device().unwrap().max_srq() > 0 {
        supported("shared receive queues", domain.create_srq(4, 1));
    } else {
        crate::unsupported("shared receive queues: max_srq is 0");
    }
}
