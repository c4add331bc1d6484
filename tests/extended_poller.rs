//! Extended polling, on the function device.

use std::mem::{ManuallyDrop, offset_of};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use ibverbs::completion::{
    CompletionFields, ExtendedCompletion, ExtendedCompletions, ExtendedPoller, WorkOpcode,
};
use ibverbs::queue_pair::GlobalRouteHeader;
use ibverbs::settings::ServiceLevel;
use ibverbs::{
    CompletionChannel, CompletionQueue, Context, ErrorKind, WorkCompletion, WorkStatus, ffi,
    queue_pair::AddressVector,
};
use ibverbs_function_device::{FunctionDevice, Kind};

fn inject(
    device: &FunctionDevice,
    queue: &CompletionQueue<'_>,
    ids: impl IntoIterator<Item = u64>,
) {
    for wr_id in ids {
        device.inject(queue.as_raw(), &ffi::ibv_wc { wr_id, ..Default::default() });
    }
}

fn rest(completions: &mut ExtendedCompletions<'_>) -> Vec<u64> {
    let mut ids = Vec::new();
    while let Some(completion) = completions.next().unwrap() {
        ids.push(completion.wr_id());
    }
    ids
}

/// The struct with the functions of the provider, which a context is part of.
fn larger(context: &Context<'_>) -> *mut ffi::verbs_context {
    context.as_raw().wrapping_byte_sub(offset_of!(ffi::verbs_context, context)).cast()
}

#[test]
fn fields_are_read_lazily_and_only_if_asked_for() {
    let device = FunctionDevice::model();
    let context = device.context();
    let fields = CompletionFields::STANDARD | CompletionFields::TIMESTAMP;
    let all = CompletionQueue::builder(&context, 16).extended(fields).build().unwrap();
    let none =
        CompletionQueue::builder(&context, 16).extended(CompletionFields::empty()).build().unwrap();
    let raw = all.as_raw_extended().map(|raw| raw.as_ptr().cast());
    assert_eq!(raw, Some(all.as_raw()));
    assert!(context.create_cq(16).unwrap().as_raw_extended().is_none(), "a classic queue");
    let mut wc = ffi::ibv_wc {
        wr_id: 1,
        opcode: ffi::ibv_wc_opcode::IBV_WC_RECV,
        byte_len: 100,
        qp_num: 7,
        src_qp: 8,
        slid: 9,
        sl: 10,
        dlid_path_bits: 11,
        wc_flags: 1 | 2,
        ..Default::default()
    };
    wc.__bindgen_anon_1.imm_data = 0x0102_0304_u32.to_be();
    for queue in [&all, &none] {
        device.inject(queue.as_raw(), &wc);
    }
    all.extended_poller().unwrap().poll(|completions| {
        let completion = completions.next().unwrap().unwrap();
        assert!(completion.is_success());
        assert_eq!((completion.wr_id(), completion.queue_pair_number()), (1, Some(7)));
        assert!(completion.timestamp().unwrap() > 0);
        assert_eq!(completion.wallclock_ns(), None);
        let success = completion.result().unwrap();
        assert_eq!((success.opcode(), success.byte_len()), (WorkOpcode::Receive, Some(100)));
        assert_eq!((success.immediate(), success.invalidated_rkey()), (Some(0x0102_0304), None));
        assert_eq!((success.source_queue_pair(), success.source_lid()), (Some(8), Some(9)));
        assert_eq!(
            (success.service_level(), success.destination_path_bits()),
            (Some(10), Some(11))
        );
        assert_eq!(
            (success.vlan(), success.flow_tag(), success.tag_matching()),
            (None, None, None)
        );
        assert_eq!((success.flags(), success.has_global_route()), (3, true));
        assert!(format!("{completion:?}").contains("wr_id: 1"));
    });
    none.extended_poller().unwrap().poll(|completions| {
        let completion = completions.next().unwrap().unwrap();
        assert_eq!((completion.queue_pair_number(), completion.timestamp()), (None, None));
        let success = completion.result().unwrap();
        assert_eq!((success.byte_len(), success.immediate()), (None, None));
        assert_eq!(success.flags(), 3, "what is always there");
    });
    assert_eq!(device.violations().0, 0, "{}", device.violations().1);
}

#[test]
fn failures_and_unknown_values_are_typed() {
    let device = FunctionDevice::model();
    let context = device.context();
    let fields = CompletionFields::STANDARD;
    let queue = CompletionQueue::builder(&context, 16).extended(fields).build().unwrap();
    let odd = [
        ffi::ibv_wc { opcode: ffi::ibv_wc_opcode(0x7777), wc_flags: !0xa, ..Default::default() },
        ffi::ibv_wc { status: ffi::ibv_wc_status(0x8888), vendor_err: 0x17, ..Default::default() },
        ffi::ibv_wc { status: ffi::ibv_wc_status(5), qp_num: 9, ..Default::default() },
        ffi::ibv_wc { wc_flags: 8, ..Default::default() },
    ];
    for wc in &odd {
        device.inject(queue.as_raw(), wc);
    }
    queue.extended_poller().unwrap().poll(|completions| {
        let success = completions.next().unwrap().unwrap();
        let success = success.result().unwrap();
        assert_eq!(success.opcode(), WorkOpcode::Unknown(0x7777));
        assert_eq!((success.flags(), success.immediate()), (!0xa, None));
        let failure = completions.next().unwrap().unwrap();
        let error = failure.result().unwrap_err();
        assert_eq!((error.status(), error.vendor_error()), (WorkStatus::Unknown(0x8888), 0x17));
        let failure = completions.next().unwrap().unwrap();
        assert_eq!(failure.result().unwrap_err().status(), WorkStatus::Flushed);
        assert_eq!(failure.queue_pair_number(), Some(9));
        let invalidated = completions.next().unwrap().unwrap();
        let invalidated = invalidated.result().unwrap();
        assert_eq!((invalidated.invalidated_rkey(), invalidated.immediate()), (Some(0), None));
    });
}

#[test]
fn what_the_device_does_not_report_is_refused() {
    let device = FunctionDevice::model();
    let context = device.context();
    let build = |fields| CompletionQueue::builder(&context, 16).extended(fields).build();
    let unknown = CompletionFields::from_bits_retain(1 << 40);
    for fields in [CompletionFields::WALLCLOCK, CompletionFields::VLAN, unknown] {
        let error = build(fields).unwrap_err();
        assert_eq!((error.kind(), error.verb()), (ErrorKind::Unsupported, "ibv_create_cq_ex"));
    }
    device.fail("create_cq_ex").errno(libc::ENOMEM).times(1);
    assert_eq!(build(CompletionFields::empty()).unwrap_err().kind(), ErrorKind::Resource);

    let plain = context.create_cq(16).unwrap();
    let error = plain.extended_poller().unwrap_err();
    assert!(error.to_string().contains("not an extended one"), "{error}");
}

#[test]
fn a_field_without_a_function_is_refused() {
    type Create = unsafe extern "C" fn(
        *mut ffi::ibv_context,
        *mut ffi::ibv_cq_init_attr_ex,
    ) -> *mut ffi::ibv_cq_ex;
    static ORIGINAL: OnceLock<Create> = OnceLock::new();

    /// Accepts every queue, and provides neither times nor immediates.
    unsafe extern "C" fn forgetful(
        context: *mut ffi::ibv_context,
        attributes: *mut ffi::ibv_cq_init_attr_ex,
    ) -> *mut ffi::ibv_cq_ex {
        // SAFETY: as libibverbs calls it.
        unsafe {
            (*attributes).wc_flags &= CompletionFields::STANDARD.bits();
            let queue = ORIGINAL.get().unwrap()(context, attributes);
            (*queue).read_imm_data = None;
            queue
        }
    }

    let device = FunctionDevice::model();
    let context = device.context();
    // SAFETY: the context is live.
    unsafe {
        let larger = larger(&context);
        ORIGINAL.set((*larger).create_cq_ex.unwrap()).unwrap();
        (*larger).create_cq_ex = Some(forgetful);
    }
    let build = |fields| CompletionQueue::builder(&context, 16).extended(fields).build();
    for fields in [CompletionFields::IMMEDIATE, CompletionFields::WALLCLOCK] {
        assert_eq!(build(fields).unwrap_err().kind(), ErrorKind::Unsupported);
    }
    assert_eq!(device.live(Kind::CompletionQueue), 0, "what came back was destroyed");
    let queue = build(CompletionFields::BYTE_LEN).unwrap();
    inject(&device, &queue, [1]);
    queue.extended_poller().unwrap().poll(|completions| {
        let completion = completions.next().unwrap().unwrap();
        let success = completion.result().unwrap();
        assert_eq!((success.byte_len(), success.immediate()), (Some(0), None));
    });
}

#[test]
fn a_poll_ends_however_the_closure_does() {
    let device = FunctionDevice::model();
    let context = device.context();
    let fields = CompletionFields::empty();
    let queue = CompletionQueue::builder(&context, 16).extended(fields).build().unwrap();
    let mut poller = queue.extended_poller().unwrap();

    assert!(poller.poll(rest).is_empty());
    inject(&device, &queue, 1..=5);
    // The closure leaves early: completions that it was lent are taken, the rest stays.
    poller.poll(|completions| {
        assert_eq!(completions.next().unwrap().unwrap().wr_id(), 1);
    });
    // The closure never asks for one: nothing is taken.
    poller.poll(|_| ());
    // The closure panics.
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        poller.poll(|completions| {
            assert_eq!(completions.next().unwrap().unwrap().wr_id(), 2);
            panic!("on purpose");
        })
    }));
    assert!(panicked.is_err());
    // Classic polling beside it.
    let mut room = [ibverbs::WorkCompletion::default(); 1];
    assert_eq!(queue.poll(&mut room).unwrap()[0].wr_id(), 3);
    poller.poll(|completions| {
        assert_eq!(rest(completions), [4, 5]);
        // After the end, a new poll can begin.
        inject(&device, &queue, [6]);
        assert_eq!(rest(completions), [6]);
        assert!(completions.next().unwrap().is_none());
    });
    assert_eq!(device.violations().0, 0, "{}", device.violations().1);
}

/// mlx5 keeps the queue locked until then: another thread could not poll it.
#[test]
fn a_poll_ends_when_the_queue_is_empty_and_not_with_the_closure() {
    type EndPoll = unsafe extern "C" fn(*mut ffi::ibv_cq_ex);
    static REAL: OnceLock<EndPoll> = OnceLock::new();
    static ENDED: AtomicUsize = AtomicUsize::new(0);
    unsafe extern "C" fn count(queue: *mut ffi::ibv_cq_ex) {
        ENDED.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's.
        unsafe { REAL.get().unwrap()(queue) }
    }
    let device = FunctionDevice::model();
    let context = device.context();
    let fields = CompletionFields::empty();
    let queue = CompletionQueue::builder(&context, 16).extended(fields).build().unwrap();
    // SAFETY: the queue is live, and not polled meanwhile.
    unsafe {
        let raw = queue.as_raw_extended().unwrap().as_ptr();
        REAL.set((*raw).end_poll.unwrap()).unwrap();
        (*raw).end_poll = Some(count);
    }
    inject(&device, &queue, [1, 2]);
    queue.extended_poller().unwrap().poll(|completions| {
        assert!(completions.next().unwrap().is_some());
        assert!(completions.next().unwrap().is_some());
        assert_eq!(ENDED.load(Ordering::Relaxed), 0);
        assert!(completions.next().unwrap().is_none());
        assert_eq!(ENDED.load(Ordering::Relaxed), 1, "the queue stays locked");
    });
    assert_eq!(ENDED.load(Ordering::Relaxed), 1, "ended twice");
    assert_eq!(device.violations().0, 0, "{}", device.violations().1);
}

#[test]
fn a_poll_that_fails_is_over() {
    let device = FunctionDevice::model();
    let context = device.context();
    let fields = CompletionFields::empty();
    let queue = CompletionQueue::builder(&context, 16).extended(fields).build().unwrap();
    let mut poller = queue.extended_poller().unwrap();
    inject(&device, &queue, 1..=4);
    device.fail("start_poll").errno(libc::EIO).times(1);
    let error = poller.poll(|completions| completions.next().map(|_| ()).unwrap_err());
    assert_eq!((error.verb(), error.raw_os_error()), ("ibv_start_poll", Some(libc::EIO)));
    device.fail("next_poll").errno(libc::EINVAL).times(1);
    poller.poll(|completions| {
        assert_eq!(completions.next().unwrap().unwrap().wr_id(), 1);
        let error = completions.next().map(|_| ()).unwrap_err();
        assert_eq!((error.verb(), error.raw_os_error()), ("ibv_next_poll", Some(libc::EINVAL)));
        assert_eq!(rest(completions), [2, 3, 4]);
    });
    // For a broken queue, mlx5 and hns return a value that is no errno.
    unsafe extern "C" fn broken(_: *mut ffi::ibv_cq_ex, _: *mut ffi::ibv_poll_cq_attr) -> i32 {
        -2
    }
    // SAFETY: the queue is live, an extended one, and not being polled.
    unsafe { (*queue.as_raw().cast::<ffi::ibv_cq_ex>()).start_poll = Some(broken) };
    let error = poller.poll(|completions| completions.next().map(|_| ()).unwrap_err());
    assert_eq!(error.raw_os_error(), Some(libc::EIO));
    assert_eq!(device.violations().0, 0, "{}", device.violations().1);
}

#[test]
fn a_forgotten_poller_hangs_nobody() {
    let device = FunctionDevice::model();
    let context = device.context();
    let fields = CompletionFields::empty();
    let queue = CompletionQueue::builder(&context, 16).extended(fields).build().unwrap();
    let first = queue.extended_poller().unwrap();
    assert_eq!(queue.extended_poller().unwrap_err().kind(), ErrorKind::Busy);
    drop(first);
    let mut second = queue.extended_poller().unwrap();
    inject(&device, &queue, [1, 2]);
    second.poll(|completions| {
        // The completion that ends the poll is not among those lent.
        let _forgotten = ManuallyDrop::new(completions.next().unwrap());
    });
    std::mem::forget(second);
    assert_eq!(queue.extended_poller().unwrap_err().kind(), ErrorKind::Busy);
    let mut room = [ibverbs::WorkCompletion::default(); 1];
    assert_eq!(queue.poll(&mut room).unwrap()[0].wr_id(), 2);
    drop(queue);
    drop(context);
    device.assert_clean();
}

#[test]
fn it_waits_and_arms_as_the_queue_does() {
    let device = FunctionDevice::model();
    let context = device.context();
    let fields = CompletionFields::empty();
    let plain = CompletionQueue::builder(&context, 16).extended(fields).build().unwrap();
    let error = plain.extended_poller().unwrap().wait(rest).unwrap_err();
    assert!(error.to_string().contains("CompletionQueueBuilder::own_channel"), "{error}");

    let own = CompletionQueue::builder(&context, 16).extended(fields).own_channel();
    let own = own.build().unwrap();
    let mut poller = own.extended_poller().unwrap();
    let soon = Duration::from_millis(20);
    assert_eq!(
        poller.wait_until(Instant::now() + soon, rest).unwrap_err().kind(),
        ErrorKind::TimedOut
    );
    thread::scope(|scope| {
        scope.spawn(|| {
            thread::sleep(soon);
            inject(&device, &own, [1]);
        });
        assert_eq!(poller.wait(rest).unwrap(), [1]);
    });
    device.fail("start_poll").errno(libc::EIO).times(1);
    let failed = poller.wait(|completions| completions.next().map(|_| ())).unwrap();
    assert_eq!(failed.unwrap_err().raw_os_error(), Some(libc::EIO));

    let channel = CompletionChannel::new(&context).unwrap();
    let shared = CompletionQueue::builder(&context, 16).extended(fields).channel(&channel).token(3);
    let shared = shared.build().unwrap();
    let mut poller = ExtendedPoller::new(&shared).unwrap();
    assert_eq!(poller.poll_or_arm(rest).unwrap(), None);
    inject(&device, &shared, [2]);
    assert_eq!(channel.wait().unwrap().token(), 3);
    assert_eq!(poller.poll_or_arm(rest).unwrap(), Some(vec![2]));
    assert_eq!(device.violations().0, 0, "{}", device.violations().1);
}

#[test]
fn what_is_lent_can_be_printed() {
    let device = FunctionDevice::model();
    let context = device.context();
    let fields = CompletionFields::STANDARD;
    let queue = CompletionQueue::builder(&context, 16).extended(fields).build().unwrap();
    inject(&device, &queue, [1]);
    let mut poller = queue.extended_poller().unwrap();
    let text = poller.poll(|completions| {
        let show = |completion: ExtendedCompletion<'_>| format!("{completion:?}");
        completions.next().unwrap().map(show).unwrap()
    });
    assert!(text.contains("Send"), "{text}");
    assert!(format!("{poller:?}").contains("ExtendedPoller"));
}

/// Soft-RoCE's `ibv_next_poll` is broken: see the source.
#[test]
fn on_soft_roce_each_completion_is_a_poll_of_its_own() {
    type Query = unsafe extern "C" fn(
        *mut ffi::ibv_context,
        *const ffi::ibv_query_device_ex_input,
        *mut ffi::ibv_device_attr_ex,
        usize,
    ) -> i32;
    static ORIGINAL: OnceLock<Query> = OnceLock::new();

    unsafe extern "C" fn soft_roce(
        context: *mut ffi::ibv_context,
        input: *const ffi::ibv_query_device_ex_input,
        attributes: *mut ffi::ibv_device_attr_ex,
        size: usize,
    ) -> i32 {
        // SAFETY: as libibverbs calls it.
        unsafe {
            let returned = ORIGINAL.get().unwrap()(context, input, attributes, size);
            (*attributes).orig_attr.vendor_id = 0xff_ffff;
            (*attributes).orig_attr.vendor_part_id = 0;
            returned
        }
    }

    let device = FunctionDevice::model();
    let context = device.context();
    // SAFETY: the context is live.
    unsafe {
        let larger = larger(&context);
        ORIGINAL.set((*larger).query_device_ex.unwrap()).unwrap();
        (*larger).query_device_ex = Some(soft_roce);
    }
    let fields = CompletionFields::empty();
    let queue = CompletionQueue::builder(&context, 16).extended(fields).build().unwrap();
    inject(&device, &queue, 1..=5);
    let mut poller = queue.extended_poller().unwrap();
    poller.poll(|completions| assert!(completions.next().unwrap().is_some()));
    assert_eq!(poller.poll(rest), [2, 3, 4, 5]);
    assert_eq!((device.calls("next_poll"), device.calls("start_poll")), (0, 6));
    assert_eq!(device.violations().0, 0, "{}", device.violations().1);
}

/// A program answers a datagram in the same way after either kind of completion.
#[test]
fn a_datagram_is_answered_by_what_an_extended_completion_says() {
    let device = FunctionDevice::model();
    let context = device.context();
    let header = GlobalRouteHeader::from_bytes([0; GlobalRouteHeader::LEN]);
    let received = ffi::ibv_wc {
        opcode: ffi::ibv_wc_opcode::IBV_WC_RECV,
        slid: 9,
        sl: 10,
        dlid_path_bits: 11,
        ..Default::default()
    };
    let plain = context.create_cq(4).unwrap();
    device.inject(plain.as_raw(), &received);
    let mut completions = [WorkCompletion::default()];
    let success = plain.poll(&mut completions).unwrap()[0].result().unwrap();
    let path = AddressVector::reply_to(&context, 1, &success, &header).unwrap();
    let expected =
        AddressVector::new(1, 9).service_level(ServiceLevel::new(10).unwrap()).source_path_bits(11);
    assert_eq!(path, expected);
    let needed = [
        CompletionFields::SOURCE_LID,
        CompletionFields::SERVICE_LEVEL,
        CompletionFields::DESTINATION_PATH_BITS,
    ];
    let all = needed.into_iter().fold(CompletionFields::empty(), |all, field| all | field);
    for fields in needed.map(|field| all - field).into_iter().chain([all]) {
        let queue = CompletionQueue::builder(&context, 4).extended(fields).build().unwrap();
        device.inject(queue.as_raw(), &received);
        queue.extended_poller().unwrap().poll(|completions| {
            let completion = completions.next().unwrap().unwrap();
            let success = completion.result().unwrap();
            match AddressVector::reply_to(&context, 1, &success, &header) {
                Ok(path) => assert_eq!((path, fields), (expected, all)),
                Err(error) => {
                    assert_ne!(fields, all, "{error}");
                    assert_eq!(error.kind(), ErrorKind::InvalidInput);
                    assert!(error.to_string().contains("SOURCE_LID"), "{error}");
                }
            }
        });
    }
}
