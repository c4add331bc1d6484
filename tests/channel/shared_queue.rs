//! Channels that share a completion queue.

use std::sync::Arc;

use ibverbs::{
    Channel, CompletionQueue, ErrorKind, Inline, SendWorkRequest, SharedCompletionQueue,
    TransportError, ffi,
};
use ibverbs_function_device::{FunctionDevice, Progress};

use crate::pair::{ModelPair as Pair, builder, connect, domain, outstanding, soon};

/// Two channels, connected to each other, on one queue.
struct Sharing {
    pair: Pair,
    queue: Arc<SharedCompletionQueue<'static>>,
}

impl Sharing {
    fn new() -> Self {
        let device = FunctionDevice::model();
        let context = device.context();
        let context = Arc::new(context);
        let domain = Arc::new(ibverbs::ProtectionDomain::new(&context).unwrap());
        let queue = Arc::new(SharedCompletionQueue::new(&context, 64).unwrap());
        let (one, two) = connect(
            builder(&domain).shared_completion_queue(&queue),
            builder(&domain).shared_completion_queue(&queue),
        );
        Self { pair: Pair { one, two, domain, device }, queue }
    }

    fn finish(self) {
        drop(self.queue);
        self.pair.finish();
    }
}

#[test]
fn completions_go_to_the_queue_pair_that_they_name() {
    let mut sharing = Sharing::new();
    // Both channels use the same slots, and each polls the other's completions.
    for _ in 0..20 {
        sharing.pair.exchange();
    }
    let Pair { one, two, .. } = &mut sharing.pair;
    one.scope(|one| {
        two.scope(|two| {
            let receives = [(); 4].map(|()| two.post_receive(()));
            let sends = [(); 4].map(|()| one.post_send(()));
            // One poll by `two` takes all completions; those of the sends go to the inbox of `one`.
            for receive in receives {
                receive?.wait()?;
            }
            for send in sends {
                assert_eq!(send?.wait()?.1.opcode(), ibverbs::WorkOpcode::Send);
            }
            Ok::<_, TransportError>(())
        })
    })
    .unwrap();
    sharing.finish();
}

#[test]
fn channels_on_one_queue_work_on_different_threads() {
    let mut sharing = Sharing::new();
    let Pair { one, two, .. } = &mut sharing.pair;
    std::thread::scope(|threads| {
        threads.spawn(|| {
            for n in 0..500 {
                one.run(SendWorkRequest::new(&()).immediate(n)).unwrap();
                assert_eq!(one.receive(()).unwrap().immediate(), Some(n + 1));
            }
        });
        for n in 0..500 {
            assert_eq!(two.receive(()).unwrap().immediate(), Some(n));
            two.run(SendWorkRequest::new(&()).immediate(n + 1)).unwrap();
        }
    });
    sharing.finish();
}

#[test]
fn the_queue_cannot_be_overbooked() {
    let Sharing { pair, queue } = Sharing::new();
    let capacity = queue.capacity();
    assert_eq!(queue.available(), capacity - 16);
    let mut more = Vec::new();
    let error = loop {
        match builder(&pair.domain).shared_completion_queue(&queue).build() {
            Ok(channel) => more.push(channel),
            Err(error) => break error,
        }
    };
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    assert!(
        error
            .to_string()
            .contains("of the shared completion queue (max_send_wr + max_recv_wr) is 8"),
        "{error}"
    );
    assert_eq!(queue.available(), (capacity - 16) % 8);
    more.pop();
    assert_eq!(queue.available(), (capacity - 16) % 8 + 8);
    // A channel whose creation failed takes up no room in the queue.
    pair.device.fail("create_qp").errno(libc::ENOMEM).always();
    builder(&pair.domain).shared_completion_queue(&queue).build().unwrap_err();
    assert_eq!(queue.available(), (capacity - 16) % 8 + 8);
    pair.device.clear_faults();
    drop(more);
    let Pair { one, two, domain, device } = pair;
    drop(one);
    assert_eq!(two.close().unwrap(), ibverbs::ChannelClosed::Drained);
    assert_eq!(queue.available(), capacity);
    drop((queue, domain));
    device.assert_clean();
}

/// A channel that is connected to itself.
fn alone(
    pair: &Pair,
    number: u32,
    queue: &Arc<SharedCompletionQueue<'static>>,
) -> Channel<'static> {
    pair.device.next_qp_num(number);
    let prepared = builder(&pair.domain).shared_completion_queue(queue).build().unwrap();
    let remote = prepared.endpoint();
    assert_eq!(remote.num(), number);
    prepared.handshake(remote).unwrap()
}

#[test]
fn a_number_that_is_used_again_gets_no_old_completions() {
    let sharing = Sharing::new();
    let Sharing { pair, queue } = &sharing;
    pair.device.keep_stale_completions(true);
    for _ in 0..3 {
        let mut first = alone(pair, 0x777, queue);
        // SAFETY: there is no memory.
        let work = [(); 4].map(|()| unsafe { first.receive_unpolled(()) }.unwrap());
        pair.device.hold_completions(queue.as_raw(), 0, true);
        pair.device.break_qp(0x777);
        drop((work, first));
        assert_eq!(pair.device.held(queue.as_raw()), 4);
        // Its completions arrive when a new channel with the same slots in flight is there.
        let mut second = alone(pair, 0x777, queue);
        second
            .scope(|s| {
                let mut receives = [(); 4].map(|()| s.post_receive(()).unwrap());
                pair.device.hold_completions(queue.as_raw(), 0, false);
                pair.device.release_all(queue.as_raw());
                for _ in 0..5 {
                    for receive in &mut receives {
                        assert!(receive.poll().is_none(), "a completion of another life");
                    }
                }
                Err::<(), _>(())
            })
            .unwrap_err();
    }
    sharing.finish();
}

/// Completions that were in the queue before it was shared belong to queue pairs that are gone, or to none.
#[test]
fn a_queue_is_empty_when_it_is_first_shared() {
    let device = FunctionDevice::model();
    let context = device.context();
    let context = Arc::new(context);
    let domain = Arc::new(ibverbs::ProtectionDomain::new(&context).unwrap());
    let queue = CompletionQueue::new(&context, 64).unwrap();
    device.next_qp_num(0x777);
    for wr_id in 0..40 {
        let left = ffi::ibv_wc { wr_id, qp_num: 0x777, ..Default::default() };
        device.inject(queue.as_raw(), &left);
    }
    let queue = Arc::new(SharedCompletionQueue::from(queue));
    let sharing = || builder(&domain).shared_completion_queue(&queue);
    let (one, two) = connect(sharing(), sharing());
    assert_eq!(one.number(), 0x777);
    let mut pair = Pair { one, two, domain, device };
    pair.exchange();
    drop((queue, context));
    pair.finish();
}

/// A channel whose queue pair had to be destroyed still exists when the device assigns its number again.
#[test]
fn the_number_of_a_channel_that_was_stopped_by_force_can_be_used_again() {
    let sharing = Sharing::new();
    let Sharing { pair, queue } = &sharing;
    let mut closed = Vec::new();
    for _ in 0..6 {
        let mut channel = alone(pair, 0x777, queue);
        channel
            .scope_until(soon(), |s| {
                let receive = s.post_receive(())?;
                s.post_send(())?.wait_until(soon())?;
                receive.wait_until(soon()).map(drop)
            })
            .unwrap();
        pair.device.fail("modify_qp").errno(libc::EIO).always();
        let late = channel.until(soon()).receive(()).unwrap_err();
        assert_eq!(late, TransportError::TimedOut);
        pair.device.clear_faults();
        assert_eq!(channel.send(()).unwrap_err(), TransportError::Closed);
        closed.push(channel);
    }
    drop(closed);
    sharing.finish();
}

/// Completions that a dropped channel left behind do not hide those of others.
#[test]
fn a_reset_leaves_nothing_in_the_queue_whatever_others_have_there() {
    let device = FunctionDevice::model();
    device.progress(Progress::OnPost);
    let context = device.context();
    let context = Arc::new(context);
    let domain = Arc::new(ibverbs::ProtectionDomain::new(&context).unwrap());
    let queue = Arc::new(SharedCompletionQueue::new(&context, 64).unwrap());
    let sharing = || builder(&domain).shared_completion_queue(&queue);
    let (one, two) = connect(sharing().max_send_wr(32), sharing());
    let mut pair = Pair { one, two, domain: domain.clone(), device };
    pair.device.keep_stale_completions(true);
    let target = pair.shared(1);
    let remote = target.remote();
    // SAFETY: there is no memory.
    let write = |channel: &mut Channel<'_>| unsafe { channel.write_unpolled((), remote) }.unwrap();
    // It is connected to itself, and its inbox has room for 4.
    let prepared = sharing().max_recv_wr(0).build().unwrap();
    let itself = prepared.endpoint();
    let mut small = prepared.handshake(itself).unwrap();
    let others: Vec<_> = (0..32).map(|_| write(&mut pair.one)).collect();
    let left: Vec<_> = (0..4).map(|_| write(&mut small)).collect();
    let prepared = small.reset().unwrap();
    let itself = prepared.endpoint();
    let mut small = prepared.handshake(itself).unwrap();
    small
        .scope(|s| {
            let writes = [(); 4].map(|()| s.post_write((), remote).unwrap());
            // This polls everything, also into the small inbox.
            let one = &mut pair.one;
            others.into_iter().try_for_each(|work| work.wait(one).map(drop))?;
            writes.into_iter().try_for_each(|work| work.wait().map(drop))
        })
        .unwrap();
    drop((left, small, target, queue, domain, context));
    pair.finish();
}

#[test]
fn completions_of_nobody_are_dropped_and_strange_ones_told() {
    let mut sharing = Sharing::new();
    let Sharing { pair, queue } = &mut sharing;
    let nobody = ffi::ibv_wc { qp_num: 0xff_fffe, ..Default::default() };
    pair.device.inject(queue.as_raw(), &nobody);
    pair.exchange();
    let strange = ffi::ibv_wc { wr_id: 5, qp_num: pair.two.number(), ..Default::default() };
    pair.device.inject(queue.as_raw(), &strange);
    // It belongs to `two`; `one` does not see it.
    let target = pair.shared(1);
    pair.one.write(Inline(&[1; 8]), target.remote()).unwrap();
    let error = pair.two.until(soon()).receive(()).unwrap_err();
    assert!(matches!(error, TransportError::UnknownCompletion { wr_id: 5, .. }), "{error}");
    assert_eq!(outstanding(&pair.device, &pair.two), (0, 0));
    drop(target);
    sharing.finish();
}

#[test]
fn an_inbox_that_overflows_is_an_error_until_the_reset() {
    let mut sharing = Sharing::new();
    let Sharing { pair, queue } = &mut sharing;
    let strange = ffi::ibv_wc { wr_id: 5, qp_num: pair.two.number(), ..Default::default() };
    for _ in 0..9 {
        pair.device.inject(queue.as_raw(), &strange);
    }
    let target = pair.shared(1);
    pair.one.write(Inline(&[1; 8]), target.remote()).unwrap();
    let error = pair.two.until(soon()).receive(()).unwrap_err();
    assert!(matches!(error, TransportError::UnknownCompletion { .. }), "{error}");
    drop(target);
    let Sharing { pair, queue } = sharing;
    let mut pair = pair.reconnect();
    pair.exchange();
    Sharing { pair, queue }.finish();
}

#[test]
fn a_poll_error_is_told_to_who_polls() {
    let mut sharing = Sharing::new();
    let pair = &mut sharing.pair;
    pair.device.fail("poll_cq").errno(libc::EIO).times(1);
    let error = pair.one.receive(()).unwrap_err();
    assert!(matches!(error, TransportError::Verbs(e) if e.verb() == "ibv_poll_cq"), "{error}");
    assert_eq!(outstanding(&pair.device, &pair.one), (0, 0));
    sharing.finish();
}

#[test]
fn a_queue_of_another_context_is_refused() {
    let device = FunctionDevice::model();
    let (ours, other) = (domain(&device), FunctionDevice::model());
    let context = other.context();
    let queue = SharedCompletionQueue::from(CompletionQueue::new(&context, 64).unwrap());
    let free = queue.available();
    let error = Channel::builder(&*ours).shared_completion_queue(&queue).build().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    assert_eq!(queue.available(), free);
    let error = Channel::builder(&*ours)
        .shared_completion_queue(&queue)
        .sleep_after(1)
        .build()
        .unwrap_err();
    assert!(
        error.to_string().contains("built with CompletionQueueBuilder::own_channel"),
        "{error}"
    );
    assert_eq!(queue.available(), free);
}

/// A channel that several queues share is nothing that one of them can sleep on: the error says what is needed.
#[test]
fn sleeping_needs_a_channel_of_the_queues_own() {
    let device = FunctionDevice::model();
    let domain = domain(&device);
    let events = domain.context().create_comp_channel().unwrap();
    let queue = CompletionQueue::builder(domain.context(), 64).channel(&events);
    let queue = SharedCompletionQueue::from(queue.build().unwrap());
    let sleepy = Channel::builder(&*domain).shared_completion_queue(&queue).sleep_after(1);
    let error = sleepy.build().unwrap_err().to_string();
    assert!(error.ends_with("built with CompletionQueueBuilder::own_channel"), "{error}");
}

#[test]
fn a_queue_that_is_in_use_or_cannot_be_destroyed_says_so() {
    let device = FunctionDevice::model();
    let context = Arc::new(device.context());
    let domain = Arc::new(ibverbs::ProtectionDomain::new(&context).unwrap());
    // Borrowed, because an `Arc` that has other owners cannot be closed.
    fn two_on<'a>(
        domain: &Arc<ibverbs::ProtectionDomain<'static>>,
        queue: &'a SharedCompletionQueue<'a>,
    ) -> [Channel<'a>; 2] {
        let new = || Channel::builder(domain).shared_completion_queue(queue).build().unwrap();
        let (one, two) = (new(), new());
        let (to_one, to_two) = (one.endpoint(), two.endpoint());
        [one.handshake(to_two).unwrap(), two.handshake(to_one).unwrap()]
    }
    let queue = SharedCompletionQueue::new(&context, 64).unwrap();
    let [one, two] = two_on(&domain, &queue);
    drop(two);
    std::mem::forget(one);
    let error = queue.close().unwrap_err();
    assert_eq!((error.raw_os_error(), device.calls("destroy_cq")), (Some(libc::EBUSY), 0));

    let other = SharedCompletionQueue::new(&context, 64).unwrap();
    device.fail("destroy_cq").errno(libc::EIO).times(1);
    let error = other.close().unwrap_err();
    assert_eq!((error.verb(), error.raw_os_error()), ("ibv_destroy_cq", Some(libc::EIO)));
    drop((domain, context));
    // The verb is called once, and none of the queue's parents is destroyed.
    assert_eq!((device.calls("destroy_cq"), device.calls("free_context")), (1, 0));
    assert_eq!(device.violations().0, 0, "{}", device.violations().1);
}
