//! Acknowledgements wait for the program's answer while it polls until there is nothing.

use ibverbs::{CompletionQueue, Rc, WorkCompletion};

use crate::device::Device;

fn is_empty(queue: &CompletionQueue<'_>) -> bool {
    queue.poll(&mut [WorkCompletion::default()]).unwrap().is_empty()
}

fn is_held(device: &Device) -> bool {
    !device.lock().core.held.is_empty()
}

/// The device's own thread may send it at any time, but not each time.
#[test]
fn an_acknowledgement_outlasts_one_poll_in_vain_and_not_two() {
    const TRIES: usize = 1000;
    let devices = [(); 2].map(|()| Device::new().unwrap());
    let contexts = devices.each_ref().map(|device| device.open().unwrap());
    let domains = contexts.each_ref().map(|context| context.alloc_pd().unwrap());
    let queues = contexts.each_ref().map(|context| context.create_cq(4).unwrap());
    let prepare = |at: usize| domains[at].create_qp(&queues[at], &queues[at], Rc).build().unwrap();
    let (one, other) = (prepare(0), prepare(1));
    let endpoints = (one.endpoint(), other.endpoint());
    let mut one = one.handshake(endpoints.1).unwrap();
    let mut other = other.handshake(endpoints.0).unwrap();
    let from = domains[0].allocate::<u8>(8).unwrap();
    let mut to = domains[1].allocate::<u8>(8).unwrap();
    let mut outlasted = 0;
    for _ in 0..TRIES {
        // It counts as polling all the time from here on.
        (0..100).for_each(|_| assert!(is_empty(&queues[1])));
        // SAFETY: the test accesses no memory before both have ended, and a region is deregistered before its memory is freed.
        unsafe {
            other.post_receive(&mut to, .., 1).unwrap();
            one.post_send(&from, .., 2).unwrap();
        }
        while is_empty(&queues[1]) {}
        assert!(is_empty(&queues[1]));
        outlasted += usize::from(is_held(&devices[1]));
        assert!(is_empty(&queues[1]));
        assert!(!is_held(&devices[1]), "the second poll sends it");
        while is_empty(&queues[0]) {}
        if outlasted > 0 {
            break;
        }
    }
    assert!(outlasted > 0, "it was never held back");
}
