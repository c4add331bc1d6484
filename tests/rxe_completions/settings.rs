//! Sizes and other settings of completion queues: those that Soft-RoCE supports, and those that it refuses.

use std::thread;
use std::time::Duration;

use ibverbs::completion::CompletionFields;
use ibverbs::{CompletionQueue, ErrorKind};

use super::vm::{completions, one_at_a_time};
use super::{SOON, exchange, ids, loopback};

#[test]
#[ignore = "Soft-RoCE: it resizes completion queues in a way that the crate refuses"]
fn a_resized_queue_keeps_its_completions() {
    let _lock = one_at_a_time();
    let context = ibverbs::open("rxe0").unwrap();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(8).unwrap();
    let mut region = domain.allocate::<u8>(64).unwrap();
    let mut pair = loopback(&domain, &queue, &queue);
    for wr_id in 0..2 {
        exchange(&mut pair, &mut region, wr_id);
    }
    thread::sleep(SOON);
    assert_eq!(queue.resize(100).unwrap_err().kind(), ErrorKind::Unsupported);
    // SAFETY: if it fails, so does the test, and the queue is not used any more.
    unsafe { queue.resize_unchecked(100) }.unwrap();
    assert!(queue.capacity() >= 100, "{}", queue.capacity());
    for wr_id in 2..20 {
        exchange(&mut pair, &mut region, wr_id);
    }
    let mut found = ids(&completions(&queue, 40));
    found.sort_unstable();
    assert_eq!(found, (0..20).chain(1000..1020).collect::<Vec<_>>());
    for wr_id in 0..20 {
        exchange(&mut pair, &mut region, wr_id);
    }
    thread::sleep(SOON);
    // SAFETY: there are more completions than that, which leaves the queue as it is.
    let error = unsafe { queue.resize_unchecked(4) }.unwrap_err();
    assert!(error.to_string().contains("holds more than 4 completions"), "{error}");
    assert_eq!((error.kind(), error.verb()), (ErrorKind::InvalidInput, "ibv_resize_cq"));
    assert_eq!(completions(&queue, 40).len(), 40, "and nothing is lost by that");
    let most = context.query_device().unwrap().max_cqe();
    // SAFETY: the verb is not called.
    let error = unsafe { queue.resize_unchecked(most + 1) }.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
}

#[test]
#[ignore = "Soft-RoCE: what it lacks"]
fn what_soft_roce_has_not_is_an_error() {
    let _lock = one_at_a_time();
    let context = ibverbs::open("rxe0").unwrap();
    let queue = context.create_cq(8).unwrap();
    let error = queue.moderate(4, Duration::from_micros(10)).unwrap_err();
    assert_eq!((error.kind(), error.verb()), (ErrorKind::Unsupported, "ibv_modify_cq"));
    let build = |fields| CompletionQueue::builder(&context, 8).extended(fields);
    for builder in [
        build(CompletionFields::TIMESTAMP),
        build(CompletionFields::WALLCLOCK),
        build(CompletionFields::VLAN),
        build(CompletionFields::STANDARD).ignore_overrun(),
    ] {
        let error = builder.build().unwrap_err();
        assert_eq!((error.kind(), error.verb()), (ErrorKind::Unsupported, "ibv_create_cq_ex"));
    }
    let vectors = context.completion_vectors();
    let error = CompletionQueue::builder(&context, 8).completion_vector(vectors).build();
    assert_eq!(error.unwrap_err().kind(), ErrorKind::InvalidInput);
}
