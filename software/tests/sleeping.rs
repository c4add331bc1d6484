//! A thread that sleeps until its completion queue has something receives packets itself: that raises no event, and the
//! queue stays armed.

#[path = "support/patience.rs"]
mod patience;

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use ibverbs::provider::hooks;
use ibverbs::{
    AccessFlags, BufferPool, CompletionChannel, CompletionQueue, Context, Loop, PooledBuffer,
    ProtectionDomain, Rc, ReceiveWorkRequest, SendWorkRequest, WorkCompletion,
};
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

struct Side {
    context: Arc<Context<'static>>,
    domain: Arc<ProtectionDomain<'static>>,
    pool: BufferPool,
}

impl Side {
    fn new() -> Self {
        let context = Arc::new(Device::new().unwrap().open().unwrap());
        let domain = Arc::new(ProtectionDomain::new(&context).unwrap());
        let pool = BufferPool::new(&domain, 8, 8, AccessFlags::empty()).unwrap();
        Self { context, domain, pool }
    }
}

/// How many events it has read.
fn events(of: &Loop<'_, PooledBuffer>) -> u32 {
    // SAFETY: the queue lives as long as its loop, which another thread has no access to.
    unsafe { (&raw const (*of.as_raw()).comp_events_completed).read() }
}

/// Whoever waits for the file of a loop is woken by the peer, not by the device's thread, which would raise an event.
#[test]
fn who_waits_for_the_file_of_a_loop_receives_itself() {
    let sides = [(); 2].map(|()| Side::new());
    let [mut client, mut server] =
        sides.each_ref().map(|side| Loop::<PooledBuffer>::new(&side.context, 64).unwrap());
    let prepared = [(&client, &sides[0]), (&server, &sides[1])]
        .map(|(its, side)| its.create_channel(&side.domain).build().unwrap());
    let endpoints = prepared.each_ref().map(|prepared| prepared.endpoint());
    let [ours, theirs] = prepared;
    let ours = client.add(ours.handshake(endpoints[1]).unwrap()).unwrap();
    let theirs = server.add(theirs.handshake(endpoints[0]).unwrap()).unwrap();
    let buffer = |side: usize| sides[side].pool.take().unwrap();
    server.post(theirs, ReceiveWorkRequest::new(buffer(1)), 0).unwrap();
    let (mut early, end) = (0, deadline());
    while early < 20 {
        assert!(std::time::Instant::now() < end, "the device's own thread was always faster");
        server.arm().unwrap();
        assert!(server.next_ended().unwrap().is_none());
        client.post(ours, SendWorkRequest::new(buffer(0)), 0).unwrap();
        let before = events(&server);
        let received = loop {
            let mut file =
                libc::pollfd { fd: server.as_fd().as_raw_fd(), events: libc::POLLIN, revents: 0 };
            // SAFETY: one live structure.
            assert_eq!(unsafe { libc::poll(&mut file, 1, 60_000) }, 1, "it does not wake");
            // Whoever arms looks once more before it sleeps: the message may have come before.
            server.arm().unwrap();
            if let Some(ended) = server.next_ended().unwrap() {
                break ended;
            }
        };
        server.post(theirs, ReceiveWorkRequest::new(received.buffer), 0).unwrap();
        server.arm().unwrap();
        early += u32::from(events(&server) == before);
        while client.next_ended().unwrap().is_none() {
            assert!(std::time::Instant::now() < end, "no acknowledgement comes");
        }
    }
}

/// A loop that has been waited for, and is not any more, keeps nobody waiting: the device's thread serves the peer.
#[test]
fn the_peer_of_a_loop_that_does_not_come_is_served() {
    let sides = [(); 2].map(|()| Side::new());
    let [mut client, mut server] =
        sides.each_ref().map(|side| Loop::<PooledBuffer>::new(&side.context, 64).unwrap());
    let prepared = [(&client, &sides[0]), (&server, &sides[1])]
        .map(|(its, side)| its.create_channel(&side.domain).build().unwrap());
    let endpoints = prepared.each_ref().map(|prepared| prepared.endpoint());
    let [ours, theirs] = prepared;
    let ours = client.add(ours.handshake(endpoints[1]).unwrap()).unwrap();
    let theirs = server.add(theirs.handshake(endpoints[0]).unwrap()).unwrap();
    for _ in 0..3 {
        server.arm().unwrap();
        assert!(server.next_ended().unwrap().is_none());
        assert!(!is_readable(server.as_fd().as_raw_fd()));
        server.post(theirs, ReceiveWorkRequest::new(sides[1].pool.take().unwrap()), 0).unwrap();
        let buffer = sides[0].pool.take().unwrap();
        client.post(ours, SendWorkRequest::new(buffer), 0).unwrap();
        // Its acknowledgement: nobody calls the server's loop.
        let ended = client.wait_ended_until(deadline()).unwrap().expect("it is acknowledged");
        ended.result().unwrap();
        let received = server.wait_ended_until(deadline()).unwrap().expect("it is there");
        received.result().unwrap();
    }
}

/// The kernel refuses more than 50 paths of four epoll instances from one file.
#[test]
fn many_loops_are_in_event_loops_within_event_loops_of_the_program() {
    let context = Arc::new(Device::new().unwrap().open().unwrap());
    let nested = |fd: BorrowedFd<'_>| {
        // SAFETY: the descriptor is new, and the structure is live.
        unsafe {
            let outer = OwnedFd::from_raw_fd(libc::epoll_create1(libc::EPOLL_CLOEXEC));
            let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: 0 };
            let (to, add) = (outer.as_raw_fd(), libc::EPOLL_CTL_ADD);
            let done = libc::epoll_ctl(to, add, fd.as_raw_fd(), &mut event);
            assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
            outer
        }
    };
    let loops: Vec<_> = (0..80)
        .map(|_| {
            let one = Loop::<PooledBuffer>::new(context.clone(), 16).unwrap();
            one.arm().unwrap();
            let inner = nested(one.as_fd());
            (nested(inner.as_fd()), inner, one)
        })
        .collect();
    drop(loops);
}
