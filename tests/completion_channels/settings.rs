//! Settings of a queue at its creation, and later changes: the provider receives them.

use std::time::Duration;

use ibverbs::completion::CompletionFields;
use ibverbs::{
    CompletionChannel, CompletionQueue, ErrorKind, ProtectionDomain, WorkCompletion, ffi,
};
use ibverbs_function_device::{Builder, FunctionDevice};

#[test]
fn the_device_sees_what_was_asked_for() {
    let device = FunctionDevice::model();
    let context = device.context();
    let channel = CompletionChannel::new(&context).unwrap();
    let queue = CompletionQueue::builder(&context, 7)
        .channel(&channel)
        .token(usize::MAX)
        .completion_vector(3)
        .solicited_only()
        .build()
        .unwrap();
    let call = device.last_call("create_cq").unwrap();
    assert_eq!((call.cqe, call.comp_vector), (7, 3));
    assert_eq!(call.cq_init_attr.channel, channel.as_raw());
    assert_eq!((queue.token(), queue.capacity()), (usize::MAX, 7));
    assert_eq!(queue.channel().unwrap().as_raw(), channel.as_raw());
    queue.arm().unwrap();
    assert_eq!(device.last_call("req_notify_cq").unwrap().solicited_only, 1);

    queue.resize(100).unwrap();
    assert_eq!((device.last_call("resize_cq").unwrap().cqe, queue.capacity()), (100, 100));
    assert_eq!(queue.resize(0).unwrap_err().kind(), ErrorKind::InvalidInput);
    device.fail("resize_cq").errno(libc::EOPNOTSUPP).times(1);
    assert_eq!(queue.resize(10).unwrap_err().kind(), ErrorKind::Unsupported);

    let fields = CompletionFields::BYTE_LEN | CompletionFields::TIMESTAMP;
    let builder = CompletionQueue::builder(&context, 9).extended(fields).ignore_overrun();
    let extended = builder.channel(&channel).token(5).completion_vector(1).build().unwrap();
    let call = device.last_call("create_cq_ex").unwrap().cq_init_attr;
    assert_eq!((call.cqe, call.comp_vector, call.wc_flags), (9, 1, 1 | 128));
    assert_eq!((call.cq_context as usize, call.channel), (5, channel.as_raw()));
    assert_eq!((call.comp_mask, call.flags), (1, 2));
    assert_eq!(extended.token(), 5);
    // SAFETY: the queue is used here alone.
    let single = unsafe { CompletionQueue::builder(&context, 9).single_threaded() };
    drop(single.build().unwrap());
    let call = device.last_call("create_cq_ex").unwrap().cq_init_attr;
    assert_eq!((call.comp_mask, call.flags, call.wc_flags), (1, 1, 0));
    assert!(call.channel.is_null());

    let domain = context.alloc_pd().unwrap();
    // SAFETY: it has no thread domain.
    let parent = unsafe { ProtectionDomain::parent_domain(&domain, None) }.unwrap();
    let queue = CompletionQueue::builder(&context, 9).parent_domain(&parent).build().unwrap();
    let call = device.last_call("create_cq_ex").unwrap().cq_init_attr;
    assert_eq!((call.comp_mask, call.parent_domain), (2, parent.as_raw()));
    // The domain is gone with the queue that could not be destroyed.
    device.fail("destroy_cq").errno(libc::EIO).times(1);
    drop(queue);
    assert_eq!(parent.close().unwrap_err().raw_os_error(), Some(libc::EBUSY));
    let other = device.context();
    let error = CompletionQueue::builder(&other, 9).parent_domain(&domain).build().unwrap_err();
    assert!(error.to_string().contains("another context"), "{error}");
}

#[test]
fn moderation_is_checked_and_rounded_up() {
    let device = FunctionDevice::model();
    let context = device.context();
    let queue = context.create_cq(1).unwrap();
    let limits = context.query_device().unwrap().moderation();
    let (count, period) = (limits.max_count, Duration::from_micros(limits.max_period.into()));
    assert!(count > 0 && !period.is_zero(), "or this tests nothing");
    queue.moderate(count, Duration::from_nanos(3001)).unwrap();
    let call = device.last_call("modify_cq").unwrap().modify_cq_attr;
    assert_eq!((call.attr_mask, call.moderate.cq_count, call.moderate.cq_period), (1, count, 4));
    queue.moderate(0, period).unwrap();
    queue.moderate(0, Duration::ZERO).unwrap();
    let most = device.calls("modify_cq");
    for (count, period) in [
        (0, period + Duration::from_nanos(1)),
        (0, Duration::MAX),
        (count.saturating_add(1), Duration::ZERO),
    ] {
        if count != u16::MAX || !period.is_zero() {
            let error = queue.moderate(count, period).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
        }
    }
    assert_eq!(device.calls("modify_cq"), most, "found before the verb");
}

/// The providers of these devices leave the queue without memory if resizing fails: the next poll or post
/// would crash.
#[test]
fn queues_are_not_resized_where_a_failure_leaves_nothing() {
    for (vendor_id, vendor_part_id, provider) in
        [(0x14e4, 7, "bnxt_re"), (0xff_ffff, 0, "rxe"), (0x1175, 9, "hfi1verbs")]
    {
        let device = Builder::model()
            .limits(|options| {
                (options.vendor_id, options.vendor_part_id) = (vendor_id, vendor_part_id);
            })
            .build();
        let context = device.context();
        let domain = context.alloc_pd().unwrap();
        let (queue, receives) = (context.create_cq(16).unwrap(), domain.create_srq(16, 1).unwrap());
        for error in [queue.resize(32).unwrap_err(), receives.resize(32).unwrap_err()] {
            assert_eq!(error.kind(), ErrorKind::Unsupported);
            assert!(error.to_string().contains(provider), "{error}");
        }
        assert_eq!((device.calls("resize_cq"), device.calls("modify_srq")), (0, 0));
        // SAFETY: this provider leaves the queue as it was, whatever it says it is.
        unsafe { (queue.resize_unchecked(32).unwrap(), receives.resize_unchecked(32).unwrap()) };
        assert_eq!((device.calls("resize_cq"), device.calls("modify_srq")), (1, 1));
    }
}

#[test]
fn a_queue_is_not_made_smaller_than_what_it_holds() {
    let device = FunctionDevice::model();
    let context = device.context();
    let queue = context.create_cq(16).unwrap();
    for _ in 0..5 {
        device.inject(queue.as_raw(), &ffi::ibv_wc::default());
    }
    let error = queue.resize(4).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    assert!(error.to_string().contains("holds more than 4 completions"), "{error}");
    assert_eq!(queue.poll(&mut [WorkCompletion::default(); 8]).unwrap().len(), 5);
}
