//! A thread that sleeps until its completion queue has something receives packets itself: that raises no event, and the
//! queue stays armed.

#[path = "support/patience.rs"]
mod patience;

use std::os::fd::AsRawFd;

use ibverbs::provider::hooks;
use ibverbs::{CompletionChannel, CompletionQueue, Rc, WorkCompletion};
use ibverbs_software::Device;

use patience::deadline;

fn is_readable(fd: i32) -> bool {
    let mut file = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    // SAFETY: one live structure.
    unsafe { libc::poll(&mut file, 1, 0) == 1 }
}

#[test]
fn who_receives_itself_gets_no_event_unless_it_leaves_something() {
    let contexts = [(); 2].map(|()| Device::new().unwrap().open().unwrap());
    let domains = contexts.each_ref().map(|context| context.alloc_pd().unwrap());
    let channel = CompletionChannel::new(&contexts[1]).unwrap();
    let sends = contexts[0].create_cq(16).unwrap();
    let receives = CompletionQueue::builder(&contexts[1], 16).channel(&channel).build().unwrap();
    let prepare = |at: usize, queue| {
        let builder = domains[at].create_qp(queue, queue, Rc);
        builder.max_send_wr(8).max_recv_wr(8).build().unwrap()
    };
    let (one, other) = (prepare(0, &sends), prepare(1, &receives));
    let endpoints = (one.endpoint(), other.endpoint());
    let mut one = one.handshake(endpoints.1).unwrap();
    let mut other = other.handshake(endpoints.0).unwrap();
    let from = domains[0].allocate::<u8>(8).unwrap();
    let mut to = domains[1].allocate::<u8>(8).unwrap();
    let hooks = hooks().expect("those of the device");
    let file = channel.as_raw_fd();
    let mut room = [WorkCompletion::default()];
    let (mut early, end) = (0, deadline());
    while early < 20 {
        assert!(std::time::Instant::now() < end, "the device's own thread was always faster");
        for id in 0..2 {
            // SAFETY: nobody looks at the memory.
            unsafe { other.post_receive(&mut to, .., id).unwrap() };
        }
        receives.arm().unwrap();
        for _ in 0..2 {
            // SAFETY: as above.
            unsafe { one.post_send(&from, .., 9).unwrap() };
        }
        // SAFETY: the queue is live.
        let woke_early = unsafe { (hooks.sleep_for)(receives.as_raw(), &[file], Some(deadline())) };
        // Either this thread has received both, or another has, and there is an event.
        assert_eq!(woke_early, !is_readable(file));
        let mut left = 2 - receives.poll(&mut room).unwrap().len();
        if woke_early {
            early += 1;
            // Another thread may wait for the one that this has left.
            assert!(left == 1 && is_readable(file));
        }
        while left > 0 {
            left -= receives.poll(&mut room).unwrap().len();
        }
        while is_readable(file) {
            channel.next_event().unwrap();
        }
        let mut done = 0;
        while done < 2 {
            done += sends.poll(&mut room).unwrap().len();
        }
    }
}
