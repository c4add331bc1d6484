//! "The contract of posting": what happens to a program that does not keep its parts.

use super::*;
use ibverbs::completion::CompletionFields;
use ibverbs::domain::{XrcDomain, XrcDomainScope};
use ibverbs::queue_pair::SendOperations;
use ibverbs::{Inline, SendWorkRequest};

/// Two requests under one number: nothing tells which of them a completion is for.
#[test]
fn completions_of_one_number_cannot_be_told_apart() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(16).unwrap();
    let mut region = domain.allocate::<u8>(64).unwrap();
    let mut one = to_itself(builder(&domain, &queue, Rc));
    let mut two = to_itself(builder(&domain, &queue, Rc));
    // SAFETY: no memory is in use, or it is not touched before the completions.
    unsafe {
        two.post_receive(&mut region, .., 7).unwrap();
        one.post(SendWorkRequest::new(Inline(b"no receive")), 7).unwrap();
        two.post(SendWorkRequest::new(Inline(b"a receive")), 7).unwrap();
    }
    one.to_error().unwrap();
    let mut done = completions(&queue);
    assert!(done.iter().all(|(wr_id, _)| *wr_id == 7), "{done:?}");
    done.sort_by_key(|(_, result)| result.is_ok());
    let [(_, Err(lost)), (_, Ok(_)), (_, Ok(_))] = done[..] else { panic!("{done:?}") };
    assert_eq!(lost.status(), WorkStatus::Flushed);
}

/// The completion queues of the queue pair are null, which mlx4 and mlx5 follow. Sends that name no peer are
/// refused before the provider is called.
#[test]
fn a_receiving_xrc_queue_pair_has_no_queues() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(16).unwrap();
    let xrc_domain = XrcDomain::open(&context, XrcDomainScope::Private).unwrap();
    let mut region = domain.allocate::<u8>(64).unwrap();
    let there = domain.allocate_shared::<u64>(8, AccessFlags::REMOTE_WRITE).unwrap();
    let builder = builder(&domain, &queue, QueuePairType::XrcReceive);
    let mut pair = builder.xrc_domain(&xrc_domain).build().unwrap().into_queue_pair();
    // SAFETY: the queue pair is live.
    let (send_cq, receive_cq) = unsafe { ((*pair.as_raw()).send_cq, (*pair.as_raw()).recv_cq) };
    assert!(send_cq.is_null() && receive_cq.is_null());
    // SAFETY: nothing is posted.
    let errors = unsafe {
        [
            pair.post_send(&region, .., 1).unwrap_err(),
            pair.post(SendWorkRequest::new(Inline(b"text")), 2).unwrap_err(),
            pair.post_write(&region, ..8, remote(&there), 3).unwrap_err(),
            pair.post_read(&mut region, ..8, remote(&there), 4).unwrap_err(),
        ]
    };
    assert!(errors.iter().all(|error| error.to_string().contains("has no peer")), "{errors:?}");
    assert_eq!((device.calls("post_send"), device.calls("post_recv")), (0, 0));
    pair.close().unwrap();
}

/// EFA locks the completion queues for the duration of a batch.
#[test]
fn a_poll_within_a_batch_is_a_violation() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(16).unwrap();
    let other = context.create_cq(16).unwrap();
    let builder = builder(&domain, &queue, Rc);
    let mut pair = to_itself(builder.extended(SendOperations::SEND));
    for (polled, count) in [(&other, 0), (&queue, 1)] {
        // SAFETY: nothing is posted.
        let result = unsafe {
            pair.batch(|_| polled.poll(&mut [WorkCompletion::default()]).map(<[_]>::len))
        };
        assert_eq!(result, Ok(0));
        assert_eq!(device.violations().0, count, "{}", device.violations().1);
    }
    // Another thread just waits until the batch is complete.
    // SAFETY: nothing is posted.
    unsafe {
        pair.batch(|_| {
            std::thread::scope(|scope| {
                let poll = || queue.poll(&mut [WorkCompletion::default()]).map(<[_]>::len);
                scope.spawn(poll).join().unwrap()
            })
        })
    }
    .unwrap();
    assert_eq!(device.violations().0, 1);
}

/// mlx4, mlx5 and hns lock the completion queue to find out whether the send queue is full.
#[test]
fn a_post_to_a_full_queue_during_a_poll_is_a_violation() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let builder = CompletionQueue::builder(&context, 16).extended(CompletionFields::STANDARD);
    let queue = builder.build().unwrap();
    let mut poller = queue.extended_poller().unwrap();
    let kind = Rc;
    let mut pair = to_itself(super::builder(&domain, &queue, kind).max_send_wr(1));
    let completion = ffi::ibv_wc::default();
    for (full, count) in [(false, 0), (true, 1)] {
        device.inject(queue.as_raw(), &completion);
        let refused = poller.poll(|completions| {
            completions.next().unwrap().expect("it was put there");
            // SAFETY: inline data is copied.
            unsafe { pair.post(SendWorkRequest::new(Inline(b"text")), 1) }.is_err()
        });
        assert_eq!(refused, full);
        assert_eq!(device.violations().0, count, "{}", device.violations().1);
    }
}
