//! Futures on a loop, of one thread and behind a lock: their buffers, when verbs fail, completions are false, wakers use
//! the channel, and objects are forgotten or dropped.

use std::cell::RefCell;
use std::future::Future;
use std::mem::forget;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Wake, Waker};
use std::thread;

use ibverbs::channel::AnyBuffer;
use ibverbs::future::{Local, Locked, Share};
use ibverbs::pool::Shared;
use ibverbs::{
    AccessFlags, AsyncChannel, BufferPool, Channel, PooledBuffer, Reactor, SendWorkRequest,
    SharedMemoryRegion, TransportError, ffi, settings::MaxRnrRetries,
};
use ibverbs_function_device::{Kind, Progress};

use crate::lost_doorbell;
use crate::rig::{
    ALL, CHUNKS, Count, LEN, Rig, both, completions, connect, filled, poll, poll_in, poll_with,
    posted,
};

/// Calls a function when it is woken for the first time, or dropped before.
struct OnEnd(Mutex<Option<Box<dyn FnOnce() + Send>>>);

impl OnEnd {
    fn waker(call: impl FnOnce() + Send + 'static) -> Waker {
        Waker::from(Arc::new(Self(Mutex::new(Some(Box::new(call))))))
    }

    fn call(&self) {
        let call = self.0.lock().unwrap().take();
        if let Some(call) = call {
            call();
        }
    }
}

impl Wake for OnEnd {
    fn wake(self: Arc<Self>) {
        self.call();
    }
}

impl Drop for OnEnd {
    fn drop(&mut self) {
        self.call();
    }
}

both! {
    fn messages_go_there_and_back() -> R {
        let rig = R::<S>::new();
        for byte in 1..20 {
            rig.exchange(byte);
        }
        let target = SharedMemoryRegion::<u8>::new(&rig.domain, LEN, ALL).unwrap();
        let mut write = posted(rig.one.write(rig.buffer(3), target.remote()));
        let mut read = posted(rig.one.read(rig.buffer(0), target.remote()));
        assert_eq!(rig.one.in_flight(), 2);
        rig.serve();
        poll(&mut write).unwrap().unwrap();
        assert_eq!(poll(&mut read).unwrap().unwrap().0[..], [3; LEN]);
        assert_eq!(poll(&mut read).unwrap().unwrap_err().error, TransportError::UnknownWork);
        drop((write, read, target));
        rig.finish();
    }

    fn what_is_submitted_is_in_flight_at_once() -> R {
        let rig = R::<S>::new();
        for _ in 0..3 {
            let receives = [0; 4].map(|byte| posted(rig.two.receive(rig.buffer(byte))));
            let sends =
                [1, 2, 3, 4].map(|n| rig.one.submit(SendWorkRequest::new(rig.buffer(n))).unwrap());
            assert_eq!(rig.one.in_flight(), 4);
            let full = rig.one.submit(SendWorkRequest::new(rig.buffer(5))).unwrap_err();
            assert_eq!((full.error, full.buffer.unwrap()[0]), (TransportError::QueueFull, 5));
            rig.serve();
            for mut send in sends {
                poll(&mut send).expect("it has ended before its first poll").unwrap();
            }
            for (byte, mut receive) in (1..).zip(receives) {
                assert_eq!(poll(&mut receive).unwrap().unwrap().0[0], byte);
            }
        }
        rig.finish();
    }

    /// Each task is woken once for each thing that it waits for, and no other task.
    fn a_completion_wakes_its_own_task() -> R {
        let rig = R::<S>::new();
        let [mine, receiver, other] = [(); 3].map(|()| Arc::new(Count::default()));
        let mut receive = rig.two.receive(rig.buffer(0));
        let mut unrelated = rig.one.receive(rig.buffer(0));
        let mut send = rig.one.send(rig.buffer(1));
        assert!(poll_in(&mut receive, &receiver).is_none());
        assert!(poll_in(&mut unrelated, &other).is_none());
        // The last waker counts.
        assert!(poll_in(&mut send, &other).is_none());
        assert!(poll_in(&mut send, &mine).is_none() && poll_in(&mut send, &mine).is_none());
        rig.serve();
        assert_eq!([&mine, &receiver, &other].map(|count| count.get()), [1, 1, 0]);
        poll(&mut send).unwrap().unwrap();
        poll(&mut receive).unwrap().unwrap();
        assert_eq!([&mine, &receiver].map(Arc::strong_count), [1, 1], "no waker is kept");
        drop((send, receive, unrelated));
        assert_eq!(Arc::strong_count(&other), 1);
        rig.finish();
    }

    /// Operations go in the order of their first polls, whichever of them are dropped meanwhile.
    fn operations_wait_for_room_in_line() -> R {
        for dropped in 0..4_usize {
            let rig = R::<S>::new();
            let mut receives: Vec<_> = (0..4).map(|_| posted(rig.two.receive(rig.buffer(0)))).collect();
            let mut first: Vec<_> = (1..=4).map(|byte| posted(rig.one.send(rig.buffer(byte)))).collect();
            let counts = [(); 3].map(|()| Arc::new(Count::default()));
            let mut line: Vec<_> = [5, 6, 7].map(|byte| Some(rig.one.send(rig.buffer(byte)))).into();
            for (send, count) in line.iter_mut().zip(&counts) {
                assert!(poll_in(send.as_mut().unwrap(), count).is_none());
            }
            assert_eq!(rig.one.in_flight(), 4);
            assert_eq!(
                rig.one.submit(SendWorkRequest::new(rig.buffer(9))).unwrap_err().error,
                TransportError::QueueFull
            );
            rig.serve();
            poll(&mut first[0]).unwrap().unwrap();
            assert_eq!(counts.each_ref().map(|count| count.get()), [1, 0, 0]);
            // The dropped send was woken (0) or not (1, 2); 3 drops none.
            if dropped < 3 {
                line[dropped] = None;
            }
            first.drain(..).skip(1).for_each(|mut send| drop(poll(&mut send).unwrap().unwrap()));
            let mut sent = Vec::new();
            for (n, send) in line.iter_mut().enumerate() {
                if let Some(send) = send {
                    assert!(counts[n].get() > 0 , "{n} is woken");
                    assert!(poll_in(send, &counts[n]).is_none());
                    sent.push(5 + n as u8);
                }
            }
            for (byte, receive) in (1..=4).zip(&mut receives) {
                assert_eq!(poll(receive).unwrap().unwrap().0[0], byte);
            }
            receives.clear();
            for &byte in &sent {
                let mut receive = posted(rig.two.receive(rig.buffer(0)));
                rig.serve();
                assert_eq!(poll(&mut receive).unwrap().unwrap().0[0], byte);
            }
            for send in line.iter_mut().flatten() {
                poll(send).unwrap().unwrap();
            }
            drop((line, receives, first));
            rig.finish();
        }
    }

    /// Wherever the future is dropped, the buffer comes back when the device is done with it, and not before.
    fn dropped_futures_give_their_buffers_back_after_the_completion() -> R {
        for ended in [false, true] {
            let rig = R::<S>::new();
            let target = SharedMemoryRegion::<u8>::new(&rig.domain, LEN, ALL).unwrap();
            drop(rig.one.send(rig.buffer(1)));
            assert_eq!(rig.out(), 0);
            let receive = posted(rig.two.receive(rig.buffer(0)));
            let send = posted(rig.one.send(rig.buffer(1)));
            let read = posted(rig.one.read(rig.buffer(0), target.remote()));
            if ended {
                rig.serve();
            }
            drop((receive, send, read));
            assert_eq!(rig.out(), if ended { 1 } else { 3 });
            rig.serve();
            assert_eq!(rig.out(), 1, "the message of the receive");
            // The message was not taken, so the next receive gets it, and does not need its own buffer.
            let (message, _) = poll(&mut rig.two.receive(rig.buffer(0))).unwrap().unwrap();
            assert_eq!((message[..].to_vec(), rig.out()), (vec![1; LEN], 1));
            drop((message, target));
            rig.exchange(2);
            rig.finish();
        }
    }

    /// A task that was woken for a message and dropped wakes the next one.
    fn no_message_is_lost_with_a_dropped_receive() -> R {
        let rig = R::<S>::new();
        let counts = [(); 3].map(|()| Arc::new(Count::default()));
        let mut receives = [0; 3].map(|byte| Some(rig.two.receive(rig.buffer(byte))));
        for (receive, count) in receives.iter_mut().zip(&counts) {
            assert!(poll_in(receive.as_mut().unwrap(), count).is_none());
        }
        let sends = [1, 2].map(|byte| posted(rig.one.send(rig.buffer(byte))));
        rig.serve();
        assert_eq!(counts.each_ref().map(|count| count.get()), [1, 0, 0]);
        receives[0] = None;
        assert_eq!(counts.each_ref().map(|count| count.get()), [1, 1, 0]);
        assert_eq!(poll(receives[1].as_mut().unwrap()).unwrap().unwrap().0[0], 1);
        assert_eq!(counts.each_ref().map(|count| count.get()), [1, 1, 1]);
        assert_eq!(poll(receives[2].as_mut().unwrap()).unwrap().unwrap().0[0], 2);
        drop((sends, receives));
        rig.serve();
        assert_eq!(rig.out(), 1, "the receive that was posted by the dropped one");
        rig.exchange(3);
        assert_eq!(rig.out(), 0);
        rig.finish();
    }

    /// Receives ahead of the tasks; more than the queue has room for; and a task that gives up.
    fn receives_wait_for_room() -> R {
        let rig = R::<S>::new();
        for _ in 0..2 {
            rig.two.post_receive(rig.buffer(0)).unwrap();
        }
        let mut waiting: Vec<_> = (0..6).map(|_| posted(rig.two.receive(rig.buffer(0)))).collect();
        assert_eq!(rig.two.in_flight(), 4);
        assert_eq!(rig.two.post_receive(rig.buffer(0)).unwrap_err().error, TransportError::QueueFull);
        drop(waiting.pop());
        for round in 0..5_u8 {
            let mut send = posted(rig.one.send(rig.buffer(round)));
            rig.serve();
            poll(&mut send).unwrap().unwrap();
            let message = poll(&mut waiting.remove(0)).expect("it has arrived").unwrap().0;
            assert_eq!(message[0], round);
            // The waiting tasks are woken, and post their receives.
            waiting.iter_mut().for_each(|receive| assert!(poll(receive).is_none()));
            assert_eq!(rig.two.in_flight(), 4.min(waiting.len() + 2));
        }
        // Two more receives are still posted than there are tasks.
        assert_eq!((rig.two.in_flight(), rig.out()), (2, 2));
        rig.exchange(9);
        assert_eq!(rig.two.in_flight(), 2);
        drop(waiting);
        rig.finish();
    }

    /// A task that takes a message without posting a receive makes room for the receive of another task.
    fn who_takes_a_message_wakes_who_waits_for_room() -> R {
        let rig = R::<S>::with(|builder| builder.max_recv_wr(1));
        let count = Arc::new(Count::default());
        rig.two.post_receive(rig.buffer(0)).unwrap();
        let mut next = Box::pin(rig.two.next_message());
        assert!(poll(&mut next).is_none());
        let mut held = rig.two.receive(rig.buffer(0));
        assert!(poll_in(&mut held, &count).is_none());
        for byte in 1..=2 {
            let mut send = posted(rig.one.send(rig.buffer(byte)));
            rig.serve();
            if byte == 1 {
                assert_eq!(poll(&mut next).expect("it has arrived").unwrap().0[0], 1);
                assert_eq!(count.get(), 1, "it is woken to post its receive");
                assert!(poll_in(&mut held, &count).is_none());
            }
            poll(&mut send).unwrap().unwrap();
        }
        assert_eq!(poll(&mut held).expect("it has arrived").unwrap().0[0], 2);
        drop((next, held));
        rig.finish();
    }

    /// Receives of a channel that is not connected: one that may have been queued though its post failed, and those of an
    /// attempt that could not be taken back then. Their buffers come back, and the channel can be connected.
    fn early_receives_that_end_give_their_buffers_back() -> R {
        for is_reset_late in [false, true] {
            let rig = R::<S>::new();
            let prepare = || {
                let builder = Channel::builder(&rig.domain).max_send_wr(4).max_recv_wr(4).access(ALL);
                rig.reactor.prepare(builder.max_rnr_retries(MaxRnrRetries::UNLIMITED)).unwrap()
            };
            let (mut one, two) = (prepare(), prepare());
            let (to_one, to_two) = (one.endpoint(), two.endpoint());
            one.post_receive(rig.buffer(1)).unwrap();
            if is_reset_late {
                rig.device.fail("modify_qp").errno(libc::EIO).always();
                one = one.handshake(to_two).unwrap_err().object;
                rig.device.clear_faults();
                assert_eq!(rig.out(), 1, "the device may use it");
            } else {
                lost_doorbell::fail_next_receive();
                let failed = one.post_receive(rig.buffer(2)).unwrap_err();
                assert_eq!(failed.error.raw_os_error(), Some(libc::EACCES));
                assert!(failed.buffer.is_none());
                assert_eq!(rig.out(), 0, "both have ended");
            }
            one.post_receive(rig.buffer(3)).unwrap();
            assert_eq!(rig.out(), 1);
            let (one, two) = (one.handshake(to_two).unwrap(), two.handshake(to_one).unwrap());
            assert_eq!(one.in_flight(), 1);
            let mut send = posted(two.send(rig.buffer(4)));
            rig.serve();
            poll(&mut send).unwrap().unwrap();
            assert_eq!(poll(&mut Box::pin(one.next_message())).unwrap().unwrap().0[..], [4; LEN]);
            drop(send);
            drop((one, two));
            rig.finish();
        }
    }

    /// The receive that waited for room is posted when a message was taken, and fails though the device may have it: the
    /// channel is closed at once, though nobody is to be woken.
    fn a_held_receive_that_fails_closes_the_channel() -> R {
        let rig = R::<S>::new();
        for _ in 0..4 {
            rig.two.post_receive(rig.buffer(0)).unwrap();
        }
        let mut held = posted(rig.two.receive(rig.buffer(0)));
        let mut send = posted(rig.one.send(rig.buffer(1)));
        rig.serve();
        poll(&mut send).unwrap().unwrap();
        lost_doorbell::fail_next_receive();
        assert_eq!(poll(&mut held).unwrap().unwrap().0[0], 1);
        assert_eq!(rig.two.in_flight(), 0, "it is closed");
        drop((held, send));
        rig.finish();
    }

    /// If the held receive is of a task that waits, that task is woken and gets the error.
    fn a_held_receive_of_a_task_that_waits_fails_and_is_told() -> R {
        let rig = R::<S>::new();
        let mut first = posted(rig.two.receive(rig.buffer(0)));
        for _ in 0..3 {
            rig.two.post_receive(rig.buffer(0)).unwrap();
        }
        let [mine, other] = [(); 2].map(|()| Arc::new(Count::default()));
        let (mut held, mut behind) = (rig.two.receive(rig.buffer(0)), rig.two.receive(rig.buffer(0)));
        assert!(poll_in(&mut held, &mine).is_none() && poll_in(&mut behind, &other).is_none());
        let mut send = posted(rig.one.send(rig.buffer(1)));
        rig.serve();
        poll(&mut send).unwrap().unwrap();
        drop(poll(&mut first).unwrap().unwrap());
        let before = mine.get();
        lost_doorbell::fail_next_receive();
        assert!(poll_in(&mut held, &mine).is_none());
        assert_eq!(rig.two.in_flight(), 0, "it is closed");
        assert!(mine.get() > before, "it is woken");
        assert_eq!(other.get(), 1, "it was woken before, and comes");
        for waiting in [&mut held, &mut behind] {
            let error = poll(waiting).expect("it ends").unwrap_err().error;
            assert_eq!(error.raw_os_error(), Some(libc::EACCES));
        }
        drop((held, behind, first, send));
        rig.finish();
    }

    /// A task that is woken and never polls its receive again costs others no wake-up: they are
    /// woken for later messages.
    fn a_receive_that_was_woken_and_does_not_come_takes_no_wake_up_from_others() -> R {
        for forgotten in [false, true] {
            let rig = R::<S>::new();
            let counts = [(); 3].map(|()| Arc::new(Count::default()));
            {
            let mut receives = [0; 3].map(|byte| Box::pin(rig.two.receive(rig.buffer(byte))));
            for (receive, count) in receives.iter_mut().zip(&counts) {
                assert!(poll_in(receive, count).is_none());
            }
            let [first, mut second, mut third] = receives;
            let first = if forgotten {
                forget(first);
                None
            } else {
                Some(first)
            };
            let message = |byte| {
                let mut send = posted(rig.one.send(rig.buffer(byte)));
                rig.serve();
                poll(&mut send).unwrap().unwrap();
            };
            message(1);
            assert_eq!(counts.each_ref().map(|count| count.get()), [1, 0, 0]);
            message(2);
            assert_eq!(counts.each_ref().map(|count| count.get()), [1, 1, 0]);
            // The second task takes the first message, and wakes the third for the other.
            assert_eq!(poll_in(&mut second, &counts[1]).unwrap().unwrap().0[0], 1);
            assert_eq!(counts.each_ref().map(|count| count.get()), [1, 1, 1]);
            assert_eq!(poll_in(&mut third, &counts[2]).unwrap().unwrap().0[0], 2);
            drop(first);
            }
            if !forgotten {
                rig.finish();
            }
        }
    }

    /// A device need not flush what is posted to a queue pair that has failed: Soft-RoCE does not look.
    fn a_receive_after_the_connection_has_failed_is_flushed() -> R {
        let rig = R::<S>::new();
        let mut before = posted(rig.one.receive(rig.buffer(1)));
        let mut send = posted(rig.one.send(rig.buffer(2)));
        rig.device.break_qp(rig.one.number());
        while rig.reactor.turn().unwrap() > 0 {}
        poll(&mut send).unwrap().unwrap_err();
        // The receives end in order, and the device gets none of them.
        let posts = rig.device.calls("post_recv");
        let [first, second] = [(); 2].map(|()| Arc::new(Count::default()));
        let (mut one, mut two) = (rig.one.receive(rig.buffer(3)), rig.one.receive(rig.buffer(4)));
        let byte = |ended: ibverbs::channel::OwnedResult<PooledBuffer>| {
            let failed = ended.unwrap_err();
            assert_eq!(failed.error.work_error().unwrap().status(), ibverbs::WorkStatus::Flushed);
            failed.buffer.unwrap()[0]
        };
        assert_eq!(byte(poll(&mut before).expect("the device has flushed it")), 1);
        assert_eq!(byte(poll_in(&mut one, &first).expect("it is flushed")), 3);
        assert_eq!(byte(poll_in(&mut two, &second).expect("it is flushed")), 4);
        rig.one.post_receive(rig.buffer(5)).unwrap();
        assert_eq!(byte(poll(&mut Box::pin(rig.one.next_message())).unwrap()), 5);
        assert_eq!(rig.device.calls("post_recv"), posts);
        drop((before, send, one, two));
        rig.finish();
    }

    /// Whatever the sleep does, others have their turns.
    fn signs_of_life_yield_though_no_sleep_waits() -> R {
        let rig = R::<S>::with(|builder| builder.access(ALL));
        let count = Arc::new(Count::default());
        let mut watch = Box::pin(rig.one.keep_alive(|| std::future::ready(())));
        for turn in 1..10 {
            assert!(poll_in(&mut watch, &count).is_none());
            assert_eq!(count.get(), turn);
            rig.serve();
        }
        rig.reactor.stop(TransportError::Stopped);
        assert_eq!(poll_in(&mut watch, &count), Some(TransportError::Stopped));
        drop(watch);
        rig.finish();
    }

    /// Wakers may do as they like: they are cloned, woken and dropped while nothing is borrowed.
    fn wakers_use_the_channel() -> R {
        thread_local! {
            static CALLS: RefCell<usize> = const { RefCell::new(0) };
        }
        let rig = R::<S>::new();
        let called = || CALLS.with_borrow_mut(std::mem::take);
        // Each use of it calls all that borrows the loop.
        let (channel, reactor) = (&raw const rig.one as usize, &raw const rig.reactor as usize);
        let waker = || {
            let call = move || {
                // SAFETY: both live until the end of the test, and this thread alone uses the wakers.
                let (channel, reactor) = unsafe {
                    (&*(channel as *const AsyncChannel<S>), &*(reactor as *const Reactor<S>))
                };
                CALLS.with_borrow_mut(|calls| *calls += 1);
                let _ = (channel.in_flight(), channel.number(), reactor.capacity());
                reactor.turn().unwrap();
            };
            OnEnd::waker(call)
        };
        let mut receive = rig.two.receive(rig.buffer(0));
        let mut send = rig.one.send(rig.buffer(1));
        // Replaced, and then woken.
        for _ in 0..2 {
            assert!(poll_with(&mut receive, &waker()).is_none());
            assert!(poll_with(&mut send, &waker()).is_none());
        }
        assert_eq!(called(), 2);
        rig.serve();
        assert_eq!(called(), 2);
        poll(&mut send).unwrap().unwrap();
        poll(&mut receive).unwrap().unwrap();
        drop((send, receive));
        // Dropped while they wait.
        let (mut receive, mut send) = (rig.two.receive(rig.buffer(0)), rig.one.send(rig.buffer(1)));
        assert!(poll_with(&mut receive, &waker()).is_none());
        assert!(poll_with(&mut send, &waker()).is_none());
        drop((receive, send));
        assert_eq!(called(), 2);
        rig.serve();
        drop(poll(&mut rig.two.receive(rig.buffer(0))).unwrap().unwrap());
        // Posted without one, in line, and when all ends.
        let sends = [1, 2, 3, 4].map(|n| rig.one.submit(SendWorkRequest::new(rig.buffer(n))).unwrap());
        let mut in_line = rig.one.send(rig.buffer(5));
        assert!(poll_with(&mut in_line, &waker()).is_none());
        rig.reactor.stop(TransportError::Stopped);
        assert_eq!(called(), 1);
        drop((sends, in_line));
        rig.finish();
    }

    /// The others are woken, and the panic goes on; where something is dropped, it ends.
    fn a_waker_that_panics_takes_no_wake_up_from_others() -> R {
        let rig = R::<S>::new();
        let panics = || OnEnd::waker(|| panic!("the waker"));
        let count = Arc::new(Count::default());
        let mut sends = [1, 2, 3].map(|byte| rig.one.send(rig.buffer(byte)));
        let mut receives = [0; 3].map(|byte| rig.two.receive(rig.buffer(byte)));
        for n in 0..3 {
            if n == 1 {
                assert!(poll_with(&mut sends[n], &panics()).is_none());
            } else {
                assert!(poll_in(&mut sends[n], &count).is_none());
            }
            assert!(poll_in(&mut receives[n], &count).is_none());
        }
        rig.device.run();
        let turn = || while rig.reactor.turn().unwrap() > 0 {};
        assert!(catch_unwind(AssertUnwindSafe(turn)).is_err());
        turn();
        // The first receive is woken, and each that takes a message wakes the next.
        assert_eq!(count.get(), 3);
        for (mut send, mut receive) in sends.into_iter().zip(receives) {
            poll(&mut send).unwrap().unwrap();
            poll(&mut receive).unwrap().unwrap();
        }
        let mut send = rig.one.send(rig.buffer(1));
        assert!(poll_with(&mut send, &panics()).is_none());
        drop(send);
        rig.finish();
    }

    /// A post that is refused ends its own future only.
    fn posts_that_are_refused() -> R {
        let rig = R::<S>::new();
        let mut receive = posted(rig.one.receive(rig.buffer(2)));
        rig.device.fail("post_send").errno(libc::EACCES).times(1);
        let refused = poll(&mut rig.one.send(rig.buffer(1))).unwrap().unwrap_err();
        assert_eq!(refused.error.raw_os_error(), Some(libc::EACCES));
        assert_eq!(refused.buffer.expect("it was not posted")[..], [1; LEN]);
        rig.device.fail("post_recv").errno(libc::EACCES).times(1);
        let refused = poll(&mut rig.one.receive(rig.buffer(1))).unwrap().unwrap_err();
        assert_eq!(refused.error.raw_os_error(), Some(libc::EACCES));
        assert_eq!(refused.buffer.expect("it was not posted")[..], [1; LEN]);
        assert_eq!(rig.one.in_flight(), 1);
        let mut message = posted(rig.two.send(rig.buffer(7)));
        rig.serve();
        poll(&mut message).unwrap().unwrap();
        assert_eq!(poll(&mut receive).unwrap().unwrap().0[..], [7; LEN]);
        drop((receive, message));
        rig.finish();
    }

    /// A post that may have been queued ends all of its channel, and none of others: with its error, and with the buffers
    /// if the device can be made to give them back.
    fn posts_that_may_have_been_queued() -> R {
        for which in 0..5 {
            for can_be_taken_back in [true, false] {
                let rig = R::<S>::new();
                let target = SharedMemoryRegion::<u8>::new(&rig.domain, LEN, ALL).unwrap();
                let others = connect(&rig.reactor, &rig.domain, |builder| builder);
                let (count, untouched) = (Arc::new(Count::default()), Arc::new(Count::default()));
                let mut elsewhere = others[1].receive(rig.buffer(0));
                let mut receive = rig.one.receive(rig.buffer(2));
                let mut send = rig.one.send(rig.buffer(3));
                assert!(poll_in(&mut elsewhere, &untouched).is_none());
                assert!(poll_in(&mut receive, &count).is_none());
                assert!(poll_in(&mut send, &count).is_none());
                if which < 3 {
                    rig.device.fail("ring_doorbell").errno(libc::EACCES).times(1);
                } else {
                    lost_doorbell::fail_next_receive();
                }
                if !can_be_taken_back {
                    for verb in ["modify_qp", "destroy_qp"] {
                        rig.device.fail(verb).errno(libc::EIO).always();
                    }
                }
                let one = &rig.one;
                let failed = match which {
                    0 => poll(&mut one.send(rig.buffer(4))).unwrap().unwrap_err(),
                    1 => one.submit(SendWorkRequest::new(rig.buffer(4))).unwrap_err(),
                    2 => poll(&mut one.read(rig.buffer(4), target.remote())).unwrap().unwrap_err(),
                    3 => poll(&mut one.receive(rig.buffer(4))).unwrap().unwrap_err(),
                    _ => one.post_receive(rig.buffer(4)).unwrap_err(),
                };
                assert_eq!(failed.error.raw_os_error(), Some(libc::EACCES), "{which}");
                assert!(failed.buffer.is_none(), "the device may have it");
                // The failed post wakes both operations of the channel, since the device completes
                // nothing of theirs.
                assert_eq!((count.get(), untouched.get()), (2, 0), "{which}");
                let late = poll(&mut one.send(rig.buffer(5))).unwrap().unwrap_err();
                assert_eq!((late.error, late.buffer.is_some()), (failed.error, true));
                for (ended, byte) in [(poll(&mut send), 3), (poll(&mut receive), 2)] {
                    let ended = ended.expect("it has ended").unwrap_err();
                    assert_eq!(ended.error, failed.error, "{which}");
                    let is_back = ended.buffer.map(|buffer| buffer[..] == [byte; LEN]);
                    assert_eq!(is_back, can_be_taken_back.then_some(true), "{which}");
                }
                drop((late, send, receive));
                assert_eq!(rig.out(), if can_be_taken_back { 1 } else { 4 }, "{which}");
                rig.device.clear_faults();
                let mut message = posted(others[0].send(rig.buffer(7)));
                rig.serve();
                poll(&mut message).unwrap().unwrap();
                assert_eq!(poll(&mut elsewhere).unwrap().unwrap().0[..], [7; LEN]);
                drop((elsewhere, message, target));
                drop(others);
                if can_be_taken_back {
                    rig.finish();
                    continue;
                }
                // The queue pair can be destroyed later, which gives all buffers back.
                let R::<S> { one, two, reactor, pool, domain, device } = rig;
                drop((one, two));
                assert_eq!(pool.available(), CHUNKS, "{which}");
                drop((reactor, pool, domain));
                assert_eq!(device.violations().0, 0, "{}", device.violations().1);
            }
        }
    }

    /// A completion that the device has made up ends no future.
    fn strangers() -> R {
        let rig = R::<S>::new();
        let mut receive = posted(rig.one.receive(rig.buffer(9)));
        let received = rig.device.posted(0).unwrap();
        let mut send = posted(rig.one.send(rig.buffer(1)));
        let sent = rig.device.posted(0).unwrap();
        assert_eq!((received.receive, sent.receive), (true, false));
        let queue_pair = sent.qp_num;
        for wr_id in [sent.wr_id, received.wr_id] {
            let strangers = [
                (wr_id, queue_pair + 7),
                (wr_id.wrapping_sub(1 << 32), queue_pair),
                (wr_id.wrapping_add(1 << 32), queue_pair),
                (wr_id | u64::from(u32::MAX), queue_pair),
            ];
            for (wr_id, qp_num) in strangers {
                let stranger = ffi::ibv_wc { wr_id, qp_num, ..Default::default() };
                rig.device.inject(completions(&rig.device), &stranger);
                assert_eq!(rig.reactor.turn().unwrap(), 1);
                assert!(poll(&mut send).is_none() && poll(&mut receive).is_none());
                assert_eq!(rig.out(), 2);
            }
        }
        // The device repeats a completion.
        let mut there = posted(rig.two.receive(rig.buffer(0)));
        rig.serve();
        poll(&mut send).unwrap().unwrap();
        poll(&mut there).unwrap().unwrap();
        let again = ffi::ibv_wc { wr_id: sent.wr_id, qp_num: queue_pair, ..Default::default() };
        rig.device.inject(completions(&rig.device), &again);
        rig.reactor.turn().unwrap();
        assert!(poll(&mut send).unwrap().unwrap_err().buffer.is_none());
        drop((send, receive, there));
        rig.finish();
    }

    /// Whatever the tasks wait for; and what comes later is refused.
    fn a_reactor_that_goes_ends_everything() -> R {
        for stopped in [true, false] {
            let rig = R::<S>::new();
            let count = Arc::new(Count::default());
            let mut receive = rig.one.receive(rig.buffer(9));
            let mut sends = [1, 2, 3, 4, 5].map(|byte| rig.one.send(rig.buffer(byte)));
            assert!(poll_in(&mut receive, &count).is_none());
            for send in &mut sends {
                assert!(poll_in(send, &count).is_none());
            }
            let R::<S> { one, reactor, pool, .. } = &rig;
            if stopped {
                reactor.stop(TransportError::Cancelled);
                assert_eq!(count.get(), 6, "each is woken once");
                let late = poll(&mut one.send(filled(pool, 6))).unwrap().unwrap_err();
                assert_eq!((late.error, late.buffer.unwrap()[0]), (TransportError::Cancelled, 6));
            }
            let error = TransportError::Cancelled;
            if stopped {
                for (n, send) in sends.iter_mut().enumerate() {
                    let ended = poll(send).unwrap().unwrap_err();
                    assert_eq!(ended.error, error);
                    assert_eq!(ended.buffer.expect("the device is done with it")[0], 1 + n as u8);
                }
                let ended = poll(&mut receive).unwrap().unwrap_err();
                assert_eq!((ended.error, ended.buffer.unwrap()[0]), (error, 9));
                assert_eq!(pool.available(), CHUNKS);
            }
            drop((receive, sends));
            if stopped {
                rig.finish();
                continue;
            }
            let R::<S> { one, two, reactor, pool, domain, device } = rig;
            let mut send = one.submit(SendWorkRequest::new(filled(&pool, 1))).unwrap_err();
            assert_eq!(send.error, TransportError::QueueFull, "they were dropped, and are in flight");
            send.buffer = None;
            drop(reactor);
            let late = poll(&mut two.receive(filled(&pool, 6))).unwrap().unwrap_err();
            assert_eq!((late.error, late.buffer.is_some()), (TransportError::ReactorGone, true));
            drop((send, late));
            assert_eq!(pool.available(), CHUNKS - 1, "a message that nobody has taken");
            drop((one, two));
            assert_eq!(pool.available(), CHUNKS);
            drop((pool, domain));
            device.assert_clean();
        }
    }

    /// A queue pair that cannot be destroyed keeps its buffers, and its room.
    fn a_channel_that_cannot_be_destroyed_is_leaked() -> R {
        let R::<S> { one, two, reactor, pool, domain, device } = R::<S>::new();
        let send = posted(one.send(filled(&pool, 1)));
        let receive = posted(one.receive(filled(&pool, 2)));
        drop((send, receive));
        for verb in ["modify_qp", "destroy_qp"] {
            device.fail(verb).errno(libc::EIO).always();
        }
        drop(one);
        device.clear_faults();
        assert_eq!((CHUNKS - pool.available(), reactor.capacity().1), (2, 64 - 8 - 8));
        // The device sends it late, from memory that is still there.
        let mut there = posted(two.receive(filled(&pool, 0)));
        device.run();
        while reactor.turn().unwrap() > 0 {}
        assert_eq!(poll(&mut there).unwrap().unwrap().0[..], [1; LEN]);
        drop(there);
        drop((two, reactor, pool, domain));
        assert_eq!(device.live(Kind::QueuePair), 1);
        assert_eq!(device.violations().0, 0, "{}", device.violations().1);
    }

    /// A channel that is dropped finds its forgotten operations, and gives their buffers back.
    fn forgotten_futures_leak_until_their_channel_is_dropped() -> R {
        let rig = R::<S>::new();
        let count = Arc::new(Count::default());
        for ended in [true, false] {
            let [one, two] = connect(&rig.reactor, &rig.domain, |builder| builder);
            let mut receive = two.receive(rig.buffer(0));
            let mut sends = [1, 2, 3, 4, 5].map(|byte| one.send(rig.buffer(byte)));
            assert!(poll_in(&mut receive, &count).is_none());
            for send in &mut sends {
                assert!(poll_in(send, &count).is_none());
            }
            if ended {
                rig.serve();
            }
            forget((receive, sends));
            drop((one, two));
            assert_eq!(rig.reactor.capacity(), (64, 48));
        }
        // The buffers of the sends in line are lost, since those were not posted.
        assert_eq!((rig.out(), Arc::strong_count(&count)), (2, 1));
        let R::<S> { one, two, reactor, pool, .. } = rig;
        drop((one, two, pool));
        assert_eq!(reactor.capacity(), (64, 64));
    }

    fn what_is_forgotten_is_never_freed_under_the_device() -> R {
        for what in 0..16_u32 {
            let R::<S> { one, two, reactor, pool, domain, device } = R::<S>::new();
            let receive = posted(two.receive(filled(&pool, 0)));
            let send = posted(one.send(filled(&pool, 1)));
            if what & 1 > 0 { forget((receive, send)) } else { drop((receive, send)) }
            if what & 2 > 0 { forget(reactor) } else { drop(reactor) }
            if what & 4 > 0 { forget(pool) } else { drop(pool) }
            if what & 8 > 0 { forget((one, two)) } else { drop((one, two)) }
            device.run();
            drop(domain);
            assert_eq!(device.violations().0, 0, "{what:04b}: {}", device.violations().1);
        }
    }
}

/// Has a thread look again.
struct Unpark(thread::Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

fn block_on<F: Future + Unpin>(mut future: F, unpark: &Waker) -> F::Output {
    loop {
        match poll_with(&mut future, unpark) {
            Some(output) => return output,
            None => thread::park(),
        }
    }
}

/// Tasks of several threads share one loop, while another one turns it.
#[test]
fn tasks_of_several_threads() {
    const MESSAGES: usize = 200;
    let rig = Rig::<Locked<PooledBuffer>>::new();
    rig.device.progress(Progress::OnPost);
    let done = AtomicBool::new(false);
    thread::scope(|threads| {
        threads.spawn(|| {
            while !done.load(Ordering::SeqCst) {
                rig.reactor.turn().unwrap();
                thread::yield_now();
            }
        });
        let workers = [(); 2].map(|()| {
            threads.spawn(|| {
                let unpark = Waker::from(Arc::new(Unpark(thread::current())));
                for n in 0..MESSAGES {
                    if n % 3 == 1 {
                        // A receive that is dropped takes no message with it.
                        let mut dropped = rig.two.receive(rig.buffer(0));
                        if let Some(message) = poll_with(&mut dropped, &unpark) {
                            assert_eq!(message.unwrap().0[..], [1; LEN]);
                            block_on(rig.one.send(rig.buffer(1)), &unpark).unwrap();
                            continue;
                        }
                    }
                    let mut receive = rig.two.receive(rig.buffer(0));
                    let message = poll_with(&mut receive, &unpark);
                    block_on(rig.one.send(rig.buffer(1)), &unpark).unwrap();
                    let message = message.unwrap_or_else(|| block_on(receive, &unpark));
                    assert_eq!(message.unwrap().0[..], [1; LEN]);
                }
            })
        });
        let workers = workers.map(thread::ScopedJoinHandle::join);
        done.store(true, Ordering::SeqCst);
        workers.into_iter().for_each(Result::unwrap);
    });
    while rig.reactor.turn().unwrap() > 0 {}
    rig.finish();
}

both! {
    /// This device, like mlx5 and mlx4, does not say so when it is posted.
    fn a_message_longer_than_the_port_sends_is_refused_with_the_ports_limit() -> R {
        let device = R::<S>::new();
        device.device.change_port(1, |port| port.max_msg_sz = 300);
        let pool = BufferPool::new(&device.domain, 400, 1, AccessFlags::empty()).unwrap();
        let [one, two] = connect(&device.reactor, &device.domain, |builder| builder);
        let long = pool.take_from(&[1; 400]).unwrap().unwrap();
        let error = poll(&mut Box::pin(one.send(long))).unwrap().unwrap_err();
        let text = "by the port's max_msg_sz, the length of the message is 400, and must be within 0..=300";
        assert!(error.to_string().contains(text), "{error}");
        drop((one, two, error, pool));
        device.finish();
    }
}

both! {
    /// Whichever way it takes: of the only task that waits, of one of several, and of one that was there before.
    fn a_receive_gives_a_buffer_as_long_as_the_message() -> R {
        let rig = R::<S>::new();
        let send = |message: &'static [u8]| {
            let buffer = rig.pool.take_from(message).unwrap().unwrap();
            let mut send = posted(rig.one.send(buffer));
            rig.serve();
            let (sent, _): (PooledBuffer, _) = poll(&mut send).expect("it has ended").unwrap();
            assert_eq!(sent[..], *message);
        };
        let mut buffer = rig.pool.take().unwrap();
        for message in [&b"a"[..], b"longer", b"", b"short"] {
            let mut receive = posted(rig.two.receive(buffer));
            send(message);
            let received: PooledBuffer = poll(&mut receive).unwrap().unwrap().0;
            assert_eq!(received[..], *message);
            let mut several = [received, rig.pool.take().unwrap()].map(|room| posted(rig.two.receive(room)));
            send(message);
            send(b"another");
            let [one, two]: [PooledBuffer; 2] = several.each_mut().map(|receive| poll(receive).unwrap().unwrap().0);
            assert_eq!((&one[..], &two[..]), (message, &b"another"[..]));
            rig.two.post_receive(two).unwrap();
            send(message);
            buffer = poll(&mut Box::pin(rig.two.next_message())).unwrap().unwrap().0;
            assert_eq!(buffer[..], *message);
            drop(one);
        }
        drop(buffer);
        rig.finish();
    }
}

/// Buffers that peers access, as the buffers of a reactor.
#[test]
fn a_reactor_keeps_the_buffers_of_a_shared_pool() {
    let rig = Rig::<Locked<PooledBuffer<Shared>>>::new();
    let pool = BufferPool::shared(&rig.domain, LEN, 4, ALL).unwrap();
    let mut receive = posted(rig.two.receive(pool.take().unwrap()));
    let mut send = posted(rig.one.send(pool.take_from(b"shared").unwrap().unwrap()));
    rig.serve();
    let (sent, _): (PooledBuffer<Shared>, _) = poll(&mut send).unwrap().unwrap();
    let (received, _): (PooledBuffer<Shared>, _) = poll(&mut receive).unwrap().unwrap();
    assert_eq!(received.as_slice().to_vec(), b"shared");
    received.as_slice().write(0, b"S").unwrap();
    let mut reading = posted(rig.one.read(sent, received.remote()));
    rig.serve();
    let (read, _): (PooledBuffer<Shared>, _) = poll(&mut reading).unwrap().unwrap();
    assert_eq!(read.as_slice().to_vec(), b"Shared");
    drop((read, received, reading, send, receive));
    assert_eq!(pool.available(), 4);
    drop(pool);
    rig.finish();
}

both! {
    of AnyBuffer;

    /// Its list stays posted: the next task gets the message in it, and the end of the channel its buffers.
    fn a_dropped_receive_into_a_list_serves_the_next_task() -> R {
        let rig = R::<S>::with(|builder| builder.max_send_sge(2).max_recv_sge(2));
        for length in [LEN + 3, 2, LEN] {
            drop(posted(rig.two.receive([rig.buffer(0), rig.buffer(0)])));
            assert_eq!((rig.two.in_flight(), rig.out()), (1, 2));
            let mut receive = posted(rig.two.receive(rig.buffer(0)));
            assert_eq!((rig.two.in_flight(), rig.out()), (1, 2), "it is not posted");
            let bytes: Vec<u8> = (0..length as u8).collect();
            let (first, second) = bytes.split_at(length.min(LEN));
            let list = [first, second].map(|part| rig.pool.take_from(part).unwrap().unwrap());
            let mut send = posted(rig.one.send(list));
            rig.serve();
            poll(&mut send).unwrap().unwrap();
            let (message, success) = poll(&mut receive).unwrap().unwrap();
            assert_eq!(success.byte_len() as usize, length);
            let pieces = message.downcast::<[PooledBuffer; 2]>().unwrap();
            assert_eq!([&pieces[0][..], &pieces[1][..]], [first, second]);
        }
        assert_eq!(rig.out(), 0);
        drop(posted(rig.two.receive([rig.buffer(0), rig.buffer(0)])));
        rig.finish();
    }

    fn a_message_into_a_list_tells_each_piece_its_length() -> R {
        let rig = R::<S>::with(|builder| builder.max_send_sge(2).max_recv_sge(2));
        for count in [1, 2, 1] {
            let mut receive = posted(rig.two.receive([rig.buffer(0), rig.buffer(0)]));
            let sent: Vec<_> = (0..count).map(|_| rig.buffer(5)).collect();
            let mut send = posted(rig.one.send(sent));
            rig.serve();
            poll(&mut send).unwrap().unwrap();
            let (message, _) = poll(&mut receive).unwrap().unwrap();
            let pieces = message.downcast::<[PooledBuffer; 2]>().unwrap();
            assert_eq!(pieces.map(|piece| piece.len()), [LEN, (count - 1) * LEN]);
            // A buffer of one piece in the same place.
            let mut receive = posted(rig.two.receive(rig.buffer(0)));
            let mut send = posted(rig.one.send(rig.pool.take_from(b"one").unwrap().unwrap()));
            rig.serve();
            poll(&mut send).unwrap().unwrap();
            let (message, _) = poll(&mut receive).unwrap().unwrap();
            assert_eq!(message.downcast::<PooledBuffer>().unwrap()[..], *b"one");
        }
        rig.finish();
    }
}
