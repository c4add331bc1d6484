//! One thread that serves many channels of one completion queue.

#[path = "support/patience.rs"]
mod patience;

use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use ibverbs::{
    AccessFlags, BufferPool, Channel, CompletionQueue, MaxRnrRetries, ProtectionDomain,
    ReceiveWorkRequest, SendWorkRequest, SharedCompletionQueue,
};
use ibverbs_software::Device;

use patience::deadline;

struct Server {
    channels: Vec<Channel<'static>>,
    clients: Vec<Channel<'static>>,
    client_pool: BufferPool,
    pool: BufferPool,
    queue: Arc<SharedCompletionQueue<'static>>,
}

/// Channels with tokens 100, 101 and so on, on one queue, each with `receives` receives; and their clients,
/// on another device.
fn server(clients: usize, receives: usize) -> Server {
    let domains = [(); 2].map(|()| {
        let context = Arc::new(Device::new().unwrap().open().unwrap());
        Arc::new(ProtectionDomain::new(context).unwrap())
    });
    let context = Arc::new(Device::new().unwrap().open().unwrap());
    let domain = Arc::new(ProtectionDomain::new(&context).unwrap());
    let queue = Arc::new(SharedCompletionQueue::with_event_channel(&context, 512).unwrap());
    let pool = BufferPool::new(&domain, 64, 256, AccessFlags::empty()).unwrap();
    let client_pool = BufferPool::new(&domains[0], 64, 256, AccessFlags::empty()).unwrap();
    let patient = MaxRnrRetries::UNLIMITED;
    let pairs = (0..clients).map(|index| {
        let ours = Channel::builder(&domain).shared_completion_queue(&queue);
        let ours = ours.token(100 + index as u64).max_rnr_retries(patient).build().unwrap();
        let theirs = Channel::builder(&domains[0]).max_rnr_retries(patient).build().unwrap();
        let endpoints = (ours.endpoint(), theirs.endpoint());
        let mut ours = ours.handshake(endpoints.1).unwrap();
        for _ in 0..receives {
            post_receive(&mut ours, &pool);
        }
        (ours, theirs.handshake(endpoints.0).unwrap())
    });
    let (channels, clients) = pairs.unzip();
    Server { channels, clients, client_pool, pool, queue }
}

fn post_receive(channel: &mut Channel<'_>, pool: &BufferPool) {
    let work = channel.post_owned(ReceiveWorkRequest::new(pool.take().unwrap())).unwrap();
    work.into_token(channel, 7).unwrap();
}

fn send(channel: &mut Channel<'_>, pool: &BufferPool) {
    let mut work = channel.post_owned(SendWorkRequest::new(pool.take().unwrap())).unwrap();
    work.wait_until(channel, deadline()).unwrap().unwrap();
}

/// Everything that a channel has.
fn take_all(channel: &mut Channel<'_>) -> usize {
    let mut taken = 0;
    while let Some(ended) = channel.poll_token().unwrap() {
        assert_eq!(ended.token, 7);
        ended.result.unwrap();
        taken += 1;
    }
    taken
}

fn readable(fd: BorrowedFd<'_>, timeout_ms: i32) -> bool {
    let mut file = libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one live `pollfd`.
    unsafe { libc::poll(&mut file, 1, timeout_ms) > 0 }
}

#[test]
fn a_thread_sleeps_until_one_of_many_channels_has_something() {
    let Server { mut channels, mut clients, client_pool, pool, queue } = server(5, 2);
    assert_eq!(queue.poll().unwrap(), None);
    let soon = Instant::now() + Duration::from_millis(20);
    assert_eq!(queue.wait_until(soon).unwrap(), None);
    for index in [3, 0, 4, 4, 1] {
        thread::scope(|threads| {
            threads.spawn(|| {
                thread::sleep(Duration::from_millis(20));
                send(&mut clients[index], &client_pool);
            });
            let ready = queue.wait_until(deadline()).unwrap().unwrap();
            assert_eq!(ready.token, 100 + index as u64);
            assert_eq!(ready.number, channels[index].number());
            assert_eq!(take_all(&mut channels[index]), 1);
            assert_eq!(queue.poll().unwrap(), None);
        });
        post_receive(&mut channels[index], &pool);
    }
}

#[test]
fn channels_take_turns_however_busy_one_of_them_is() {
    let Server { mut channels, mut clients, client_pool, pool, queue } = server(3, 8);
    for _ in 0..6 {
        send(&mut clients[0], &client_pool);
    }
    send(&mut clients[1], &client_pool);
    send(&mut clients[2], &client_pool);
    // All completions are in the queue: a send has completed when the peer's receive has.
    let mut served = Vec::new();
    for _ in 0..3 {
        let ready = queue.wait_until(deadline()).unwrap().unwrap();
        let index = (ready.token - 100) as usize;
        served.push((index, take_all(&mut channels[index])));
        // The busy one is busy again at once.
        if index == 0 {
            post_receive(&mut channels[0], &pool);
            send(&mut clients[0], &client_pool);
        }
    }
    assert_eq!(served, [(0, 6), (1, 1), (2, 1)]);
    assert_eq!(queue.wait_until(deadline()).unwrap().unwrap().token, 100);
    assert_eq!(take_all(&mut channels[0]), 1);
}

#[test]
fn the_descriptor_is_readable_once_for_all_that_came_and_not_when_armed() {
    let Server { mut channels, mut clients, client_pool, queue, .. } = server(4, 4);
    queue.arm().unwrap();
    assert!(queue.ready().next().is_none());
    assert!(!readable(queue.event_fd().unwrap(), 0));
    for round in 0..3 {
        for client in &mut clients {
            send(client, &client_pool);
        }
        assert!(readable(queue.event_fd().unwrap(), 60_000), "round {round}");
        queue.arm().unwrap();
        let mut tokens: Vec<_> = queue.ready().map(|ready| ready.unwrap().token).collect();
        tokens.sort_unstable();
        assert_eq!(tokens, [100, 101, 102, 103]);
        let taken: Vec<_> = channels.iter_mut().map(take_all).collect();
        assert_eq!(taken, [1; 4]);
        // Arming again reads the event of the arming before, if there was one meanwhile.
        queue.arm().unwrap();
        assert!(queue.ready().next().is_none());
        assert!(!readable(queue.event_fd().unwrap(), 0), "round {round}");
    }
    // No descriptor stays readable: that would wake an event loop for nothing.
    drop(clients);
    drop(channels);
}

#[test]
fn several_threads_wait_for_one_queue_and_none_is_left_asleep() {
    let Server { channels, mut clients, client_pool, queue, .. } = server(4, 8);
    let channels: Vec<_> = channels.into_iter().map(std::sync::Mutex::new).collect();
    let taken = std::sync::atomic::AtomicUsize::new(0);
    thread::scope(|threads| {
        for _ in 0..3 {
            threads.spawn(|| {
                while taken.load(std::sync::atomic::Ordering::SeqCst) < 4 * 8 {
                    let soon = Instant::now() + Duration::from_millis(50);
                    let Some(ready) = queue.wait_until(soon).unwrap() else { continue };
                    let channel = &channels[(ready.token - 100) as usize];
                    let count = take_all(&mut channel.lock().unwrap());
                    taken.fetch_add(count, std::sync::atomic::Ordering::SeqCst);
                }
            });
        }
        for _ in 0..8 {
            clients.iter_mut().for_each(|client| send(client, &client_pool));
        }
    });
    assert_eq!(taken.into_inner(), 32);
}

/// A wait of the channel itself polls, and finds the message beside what it waits for.
#[test]
fn a_message_that_another_wait_of_the_channel_has_polled_makes_it_ready() {
    let Server { mut channels, mut clients, client_pool, pool, queue } = server(2, 2);
    for _ in 0..2 {
        let receive = clients[0].post_owned(ReceiveWorkRequest::new(client_pool.take().unwrap()));
        drop(receive.unwrap());
    }
    let ready = |queue: &SharedCompletionQueue<'_>| queue.poll().unwrap().map(|ready| ready.token);
    // A blocking send.
    send(&mut clients[0], &client_pool);
    channels[0].send(()).unwrap();
    assert_eq!(ready(&queue), Some(100));
    assert_eq!(ready(&queue), None);
    assert_eq!(take_all(&mut channels[0]), 1);
    // The wait for an operation in a scope, and the end of one.
    send(&mut clients[0], &client_pool);
    channels[0].scope(|s| s.post_send(())?.wait().map(drop)).unwrap();
    assert_eq!(ready(&queue), Some(100));
    assert_eq!(take_all(&mut channels[0]), 1);
    // A wait for a handle that has not ended when the deadline passes.
    post_receive(&mut channels[0], &pool);
    let mut next = channels[0].post_owned(ReceiveWorkRequest::new(pool.take().unwrap())).unwrap();
    send(&mut clients[0], &client_pool);
    assert!(next.wait_until(&mut channels[0], Instant::now()).unwrap().is_none());
    assert_eq!(ready(&queue), Some(100));
    assert_eq!(take_all(&mut channels[0]), 1);
    assert_eq!(ready(&queue), None);
    drop((next, channels, clients));
}

/// As above, while another thread sleeps: the event of the message has woken it too early.
#[test]
fn a_thread_that_sleeps_is_told_what_a_wait_of_the_channel_has_polled() {
    let Server { channels, mut clients, client_pool, pool, queue } = server(1, 1);
    let mut channels = channels.into_iter().map(Mutex::new);
    let channel = channels.next().unwrap();
    for _ in 0..10 {
        // A receive that no message comes for.
        let mut busy = channel.lock().unwrap();
        let mut next = busy.post_owned(ReceiveWorkRequest::new(pool.take().unwrap())).unwrap();
        thread::scope(|threads| {
            let sleeper = threads.spawn(|| {
                let ready = queue.wait_until(deadline()).unwrap();
                assert_eq!(ready.map(|ready| ready.token), Some(100), "it sleeps on");
                let mut channel = channel.lock().unwrap();
                assert_eq!(take_all(&mut channel), 1);
            });
            // It comes while the channel polls, mostly.
            threads.spawn(|| {
                thread::sleep(Duration::from_millis(5));
                send(&mut clients[0], &client_pool);
            });
            let soon = Instant::now() + Duration::from_millis(50);
            assert!(next.wait_until(&mut busy, soon).unwrap().is_none());
            drop(busy);
            sleeper.join().unwrap();
        });
        next.into_token(&mut channel.lock().unwrap(), 7).unwrap();
    }
}

#[test]
fn a_channel_that_is_gone_is_never_ready_and_its_place_serves_another() {
    let Server { mut channels, mut clients, client_pool, queue, .. } = server(2, 2);
    send(&mut clients[0], &client_pool);
    send(&mut clients[1], &client_pool);
    // The first channel is in the list of ready channels when it is dropped.
    assert!(queue.poll().unwrap().is_some());
    drop(channels.remove(0));
    let mut left: Vec<_> = queue.ready().map(|ready| ready.unwrap().token).collect();
    left.dedup();
    assert!(left.is_empty() || left == [101], "{left:?}");
    assert_eq!(take_all(&mut channels[0]), 1);
    assert_eq!(queue.poll().unwrap(), None);
}

#[test]
fn a_queue_without_an_event_channel_says_so() {
    let context = Arc::new(Device::new().unwrap().open().unwrap());
    let queue = SharedCompletionQueue::new(&context, 16).unwrap();
    assert_eq!(queue.poll().unwrap(), None);
    for error in [queue.arm().unwrap_err(), queue.event_fd().unwrap_err()] {
        assert_eq!(error.raw_os_error(), Some(libc::EINVAL));
    }
    assert_eq!(queue.wait().unwrap_err().raw_os_error(), Some(libc::EINVAL));
    let solicited = CompletionQueue::builder(&context, 16).own_channel().solicited_only();
    let queue = SharedCompletionQueue::from(solicited.build().unwrap());
    let error = queue.wait_until(deadline()).unwrap_err();
    assert!(error.to_string().contains("solicited"), "{error}");
}
