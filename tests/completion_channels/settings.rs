//! What a queue is made with, and what is changed later: the provider is handed it.

use std::time::Duration;

use ibverbs::{CompletionChannel, CompletionFields, CompletionQueue, ErrorKind};
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

/// Their provider frees the queue that it goes on to use, if the kernel refuses.
#[test]
fn queues_of_broadcom_devices_are_not_resized() {
    let device = Builder::model().limits(|options| options.vendor_id = 0x14e4).build();
    let context = device.context();
    let queue = context.create_cq(16).unwrap();
    let error = queue.resize(32).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.to_string().contains("bnxt_re"), "{error}");
    assert_eq!(device.calls("resize_cq"), 0);
}
