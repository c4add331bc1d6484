//! With `RDMAV_ALLOW_DISASSOC_DESTROY` libibverbs frees an object that went with its device without waiting for the
//! acknowledgement of its events. So events and destroy verbs take turns there.

use std::sync::Once;
use std::thread;
use std::time::Duration;

use ibverbs::{CompletionChannel, CompletionQueue, QueuePair, QueuePairType, ffi};
use ibverbs_function_device::FunctionDevice;

/// Long enough that a thread that does not wait would have gone on.
const WHILE: Duration = Duration::from_millis(100);

/// Sets the variable that a program sets at its start to survive a removal. This file has its own
/// process for it.
fn allow() {
    static ONCE: Once = Once::new();
    // SAFETY: each test calls this first, so no thread reads the environment meanwhile.
    ONCE.call_once(|| unsafe { std::env::set_var("RDMAV_ALLOW_DISASSOC_DESTROY", "1") });
}

#[test]
fn a_destroy_verb_waits_for_events_that_are_read() {
    allow();
    let device = FunctionDevice::model();
    let context = device.context();
    let channel = CompletionChannel::new(&context).unwrap();
    let queue = CompletionQueue::builder(&context, 16).channel(&channel).token(7).build().unwrap();
    device.raise_cq_event(queue.as_raw());
    device.hold_readers(true);
    thread::scope(|threads| {
        let reader = threads.spawn(|| channel.next_event().unwrap().unwrap().token());
        while device.held_readers() == 0 {
            assert!(!reader.is_finished(), "there is no event");
            thread::yield_now();
        }
        // After the removal, no destroy verb waits for an acknowledgement.
        device.remove();
        let destroyer = threads.spawn(|| drop(queue));
        thread::sleep(WHILE);
        let early = device.calls("destroy_cq");
        device.hold_readers(false);
        assert_eq!(early, 0, "destroyed under the reader");
        assert_eq!(reader.join().unwrap(), 7);
        destroyer.join().unwrap();
    });
    assert_eq!(device.calls("destroy_cq"), 1);
}

#[test]
fn events_wait_for_a_destroy_verb_of_their_context() {
    allow();
    let device = FunctionDevice::model();
    let (context, other) = (device.context(), device.context());
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(4).unwrap();
    let kind = QueuePairType::ReliableConnected;
    let pair = QueuePair::builder(&domain, &queue, &queue, kind).build().unwrap();
    let (events, others) = (context.async_events().unwrap(), other.async_events().unwrap());
    for context in [&context, &other] {
        device.raise(context.as_raw(), ffi::ibv_event_type::IBV_EVENT_PORT_ACTIVE, 1);
    }
    device.hold_verb("destroy_qp", true);
    thread::scope(|threads| {
        let destroyer = threads.spawn(|| drop(pair));
        while !device.holds_verb("destroy_qp") {
            assert!(!destroyer.is_finished(), "the verb is not called");
            thread::yield_now();
        }
        assert!(others.next_event().unwrap().is_some(), "of another context");
        let reader = threads.spawn(|| events.next_event().unwrap());
        thread::sleep(WHILE);
        let early = reader.is_finished();
        device.hold_verb("destroy_qp", false);
        assert!(!early, "read while the verb may free what the event is about");
        assert!(reader.join().unwrap().is_some());
        destroyer.join().unwrap();
    });
}
