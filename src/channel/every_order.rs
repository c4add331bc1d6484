//! Channels of one shared completion queue, in every order of their threads: their router, and the sleepers of the queue,
//! on a device made of Rust.

use std::cell::Cell;
use std::collections::VecDeque;
use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::sync::{Arc, PoisonError};

use super::owned_buffer::{Entry, Owned};
use super::polled::{Found, Polled};
use super::router::{Inbox, Router};
use crate::completion::{Waiters, Waker};
use crate::error::Result;
use crate::ffi;
use crate::sync::{Condvar, Mutex, MutexGuard, in_every_order};

/// The completion queue, as the device and the kernel see it.
#[derive(Default)]
struct Queue {
    completions: VecDeque<ffi::ibv_wc>,
    armed: bool,
    events: u32,
    /// The queue pair that is in RESET: the device completes nothing for it.
    reset: Option<u32>,
}

struct Device {
    queue: Mutex<Queue>,
    readable: Condvar,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

unsafe extern "C" fn poll_cq(queue: *mut ffi::ibv_cq, most: c_int, out: *mut ffi::ibv_wc) -> c_int {
    // SAFETY: the queue is that of a `World`, which outlives its router, and has room for `most`.
    let (device, out) = unsafe {
        let device = &*(*queue).cq_context.cast::<Device>();
        (device, std::slice::from_raw_parts_mut(out, most as usize))
    };
    let mut queue = lock(&device.queue);
    let mut count = 0;
    for place in out {
        let Some(completion) = queue.completions.pop_front() else { break };
        *place = completion;
        count += 1;
    }
    count
}

/// Two channels, with the queue pairs `A` and `B`, whose completions go to one queue.
struct World {
    router: Arc<Router>,
    inboxes: [Inbox; 2],
    waiters: Arc<Waiters>,
    device: Arc<Device>,
    /// What was found, in any order.
    found: std::sync::Mutex<Vec<(u32, u64)>>,
    _queue: Box<ffi::ibv_cq>,
    _context: Box<ffi::ibv_context>,
}

// SAFETY: its pointers lead to what it owns, and to the device, which is `Send` and `Sync`.
unsafe impl Send for World {}
// SAFETY: as above.
unsafe impl Sync for World {}

const A: u32 = 0x11;
const B: u32 = 0x12;
/// The queue pair that replaces the one of `A`.
const NEW_A: u32 = 0x13;

impl World {
    fn new() -> Self {
        let device = Arc::new(Device { queue: Mutex::default(), readable: Condvar::new() });
        // SAFETY: numbers, and pointers and functions that may be null.
        let mut context =
            Box::new(unsafe { MaybeUninit::<ffi::ibv_context>::zeroed().assume_init() });
        context.ops.poll_cq = Some(poll_cq);
        // SAFETY: as above.
        let mut queue = Box::new(unsafe { MaybeUninit::<ffi::ibv_cq>::zeroed().assume_init() });
        queue.context = &raw mut *context;
        queue.cq_context = Arc::as_ptr(&device).cast_mut().cast();
        // SAFETY: the queue lives as long as the router, and nothing else polls it.
        let router = Arc::new(unsafe { Router::new(&raw mut *queue, 8) });
        let inboxes = [A, B].map(|number| {
            let inbox = router.reserve(4, number.into(), None).unwrap();
            router.register(&inbox, number);
            inbox
        });
        let waiters = Arc::new(Waiters::new("ibv_get_cq_event"));
        waiters.make_wakeable().unwrap();
        Self {
            router,
            inboxes,
            waiters,
            device,
            found: std::sync::Mutex::default(),
            _queue: queue,
            _context: context,
        }
    }

    /// The device completes a request.
    fn complete(&self, number: u32, wr_id: u64) {
        let mut queue = lock(&self.device.queue);
        if queue.reset == Some(number) {
            return;
        }
        queue.completions.push_back(ffi::ibv_wc { qp_num: number, wr_id, ..Default::default() });
        if std::mem::take(&mut queue.armed) {
            queue.events += 1;
            assert_eq!(queue.events, 1, "events pile up");
            drop(queue);
            self.device.readable.notify_all();
        }
    }

    /// What a channel finds, as (number, wr_id).
    fn poll(&self, inbox: &Inbox) -> Result<Option<Vec<(u32, u64)>>> {
        let mut out = [ffi::ibv_wc::default(); 2];
        let found = self.router.poll(inbox, &mut out);
        assert!(found >= 0, "{found}");
        let list: Vec<_> = out[..found as usize].iter().map(|wc| (wc.qp_num, wc.wr_id)).collect();
        Ok(Some(list).filter(|list| !list.is_empty()))
    }

    /// Sleeps as [`crate::CompletionQueue::wait`] and channels do.
    fn sleep<R>(&self, poll: impl FnMut() -> Result<Option<R>>) -> R {
        let arm = || {
            lock(&self.device.queue).armed = true;
            Ok(())
        };
        let read = |waker: Option<&Waker>| {
            let mut queue = lock(&self.device.queue);
            while queue.events == 0 {
                if waker.is_some_and(Waker::is_awake) {
                    return Ok(false);
                }
                let woken = self.device.readable.wait(queue);
                queue = woken.unwrap_or_else(PoisonError::into_inner);
            }
            queue.events -= 1;
            Ok(true)
        };
        self.waiters.sleep_until(None, poll, || false, arm, read).unwrap()
    }

    /// Sleeps until the channel has all of `expected`, which come in this order, and nothing else.
    fn receive(&self, inbox: &Inbox, expected: &[(u32, u64)]) {
        let mut found = Vec::new();
        while found.len() < expected.len() {
            found.extend(self.sleep(|| self.poll(inbox)));
        }
        assert_eq!(found, expected);
    }

    fn note(&self, found: impl IntoIterator<Item = (u32, u64)>) {
        self.found.lock().unwrap().extend(found);
    }

    /// Nothing is left anywhere.
    fn is_empty(&self) {
        for inbox in &self.inboxes {
            assert_eq!(self.poll(inbox).unwrap(), None);
        }
        let mut polled = Polled::new(&self.router);
        assert!(matches!(self.router.poll_into(&mut polled), Ok(Found::Nothing)));
    }
}

/// Each channel gets its own completions, once and in order, whoever polls them; and none sleeps on.
#[test]
fn each_channel_gets_its_own() {
    let a = |world: &World| world.receive(&world.inboxes[0], &[(A, 1), (A, 2)]);
    let b = |world: &World| world.receive(&world.inboxes[1], &[(B, 1)]);
    let device = |world: &World| {
        world.complete(A, 1);
        world.complete(B, 1);
        world.complete(A, 2);
    };
    let runs = in_every_order(World::new, [a, b, device], World::is_empty);
    assert!(runs > 1_000, "{runs}");
}

/// A channel is stopped and reset while another one polls the same queue: after the reset it sees no
/// completion of an earlier request, and the other channel loses none.
#[test]
fn a_reset_leaves_nothing_of_the_earlier_connection() {
    let a = |world: &World| {
        // What was flushed and is polled before the reset is of this connection.
        for (number, _) in world.poll(&world.inboxes[0]).unwrap().into_iter().flatten() {
            assert_eq!(number, A);
        }
        lock(&world.device.queue).reset = Some(A);
        world.router.clear(&world.inboxes[0]);
        assert_eq!(world.poll(&world.inboxes[0]).unwrap(), None, "after the reset");
        world.router.renumber(&world.inboxes[0], NEW_A);
        world.complete(NEW_A, 1);
        world.receive(&world.inboxes[0], &[(NEW_A, 1)]);
    };
    let b = |world: &World| world.receive(&world.inboxes[1], &[(B, 1), (B, 2)]);
    let device = |world: &World| {
        for wr_id in 1..=2 {
            world.complete(A, wr_id);
            world.complete(B, wr_id);
        }
    };
    let runs = in_every_order(World::new, [a, b, device], World::is_empty);
    assert!(runs > 1_000, "{runs}");
}

/// A channel is dropped while another one polls the same queue, and a third one takes its inbox.
#[test]
fn an_inbox_that_is_taken_again_holds_nothing() {
    let a = |world: &World| {
        lock(&world.device.queue).reset = Some(A);
        world.router.release(&world.inboxes[0]);
        let inbox = world.router.reserve(4, NEW_A.into(), None).unwrap();
        assert!(inbox.has_place_of(&world.inboxes[0]));
        world.router.register(&inbox, NEW_A);
        assert_eq!(world.poll(&inbox).unwrap(), None, "of the channel that is gone");
        world.complete(NEW_A, 7);
        world.receive(&inbox, &[(NEW_A, 7)]);
        assert_eq!(world.poll(&world.inboxes[0]).unwrap(), None, "of its successor");
    };
    let b = |world: &World| world.receive(&world.inboxes[1], &[(B, 1)]);
    let device = |world: &World| {
        world.complete(A, 1);
        world.complete(B, 1);
    };
    let runs = in_every_order(World::new, [a, b, device], World::is_empty);
    assert!(runs > 100, "{runs}");
}

/// A reactor takes completions past the inboxes. What it puts back because the channel is in use, and what it has
/// when it ends early, is found by the channels.
#[test]
fn what_a_reactor_does_not_hand_out_is_not_lost() {
    let reactor = |world: &World| {
        for _ in 0..2 {
            let mut polled = Polled::new(&world.router);
            if let Found::Completions = world.router.poll_into(&mut polled).unwrap()
                && let Some((token, completions)) = polled.next()
            {
                assert!(!completions.is_empty());
                if token == u64::from(A) {
                    world.router.put_back(completions);
                } else {
                    world.note(completions.iter().map(|polled| {
                        let completion = polled.completion();
                        assert_eq!(u64::from(completion.qp_num), token);
                        (completion.qp_num, completion.wr_id)
                    }));
                }
            }
        }
    };
    let a =
        |world: &World| world.note(world.poll(&world.inboxes[0]).unwrap().into_iter().flatten());
    let device = |world: &World| {
        world.complete(A, 1);
        world.complete(B, 1);
        world.complete(A, 2);
    };
    let all = |world: &World| {
        for inbox in &world.inboxes {
            while let Some(found) = world.poll(inbox).unwrap() {
                world.note(found);
            }
        }
        world.is_empty();
        let mut found = world.found.lock().unwrap();
        found.sort();
        assert_eq!(*found, [(A, 1), (A, 2), (B, 1)]);
    };
    let runs = in_every_order(World::new, [reactor, a, device], all);
    assert!(runs > 100, "{runs}");
}

/// Handles that are dropped on other threads, and the channel that looks for them now and then.
struct Handles {
    owned: Owned,
    entries: [Entry; 2],
    /// How many of the present connection the channel has noticed.
    noticed: Cell<u32>,
}

// SAFETY: one thread at a time is the channel, and only that touches more than the entries' atomics.
unsafe impl Sync for Handles {}

impl Handles {
    fn new() -> Self {
        let entries = [(); 2].map(|()| Entry::new());
        Self { owned: Owned::new(), entries, noticed: Cell::new(0) }
    }

    /// The number of the request in a slot, in one of the channel's connections.
    fn number(connection: u64, index: usize) -> u64 {
        connection << 32 | index as u64
    }

    fn drop_handle(&self, connection: u64, index: usize) {
        self.owned.mark_dropped(&self.entries[index], Self::number(connection, index));
    }

    /// As `Core::release_dropped`, in the second connection.
    fn look(&self) {
        if self.owned.any_dropped() {
            self.owned.take_dropped(
                |index| self.entries.get(index),
                |index| {
                    let dropped = self.entries[index].take_dropped(Self::number(2, index));
                    self.noticed.set(self.noticed.get() + u32::from(dropped));
                },
            );
        }
    }

    fn check(&self) {
        self.look();
        assert_eq!(self.noticed.get(), 2);
        assert!(!self.owned.any_dropped());
    }
}

/// No handle that was dropped is overlooked, also if one of an earlier connection had the same place.
#[test]
fn every_handle_that_is_dropped_is_noticed() {
    let channel = |handles: &Handles| {
        handles.look();
        handles.look();
    };
    let [early, first, second]: [fn(&Handles); 3] =
        [|it| it.drop_handle(1, 0), |it| it.drop_handle(2, 0), |it| it.drop_handle(2, 1)];
    let both = |handles: &Handles| {
        handles.drop_handle(2, 0);
        handles.drop_handle(2, 1);
    };
    let runs = in_every_order(Handles::new, [channel, first, second], Handles::check);
    assert!(runs > 10, "{runs}");
    in_every_order(Handles::new, [channel, early, both], Handles::check);
}

/// A reactor gets the completions that follow one another for one channel together, and in order.
#[test]
fn a_reactor_gets_what_is_for_one_channel_together() {
    let check = |world: &World| {
        for (number, wr_id) in [(A, 1), (A, 2), (B, 1), (A, 3)] {
            world.complete(number, wr_id);
        }
        let mut polled = Polled::new(&world.router);
        assert!(matches!(world.router.poll_into(&mut polled), Ok(Found::Completions)));
        assert!(!polled.is_full());
        for expected in [&[(A, 1), (A, 2)][..], &[(B, 1)]] {
            let (token, completions) = polled.next().unwrap();
            let found = completions.iter().map(|polled| polled.completion());
            let found: Vec<_> =
                found.map(|completion| (completion.qp_num, completion.wr_id)).collect();
            assert_eq!((token, &found[..]), (expected[0].0.into(), expected));
        }
        world.router.put_back(polled.next().unwrap().1);
        assert!(polled.next().is_none());
        assert!(
            matches!(world.router.poll_into(&mut polled), Ok(Found::Ready(token)) if token == u64::from(A))
        );
        assert_eq!(world.poll(&world.inboxes[0]).unwrap(), Some(vec![(A, 3)]));
        world.is_empty();
    };
    in_every_order(World::new, [], check);
}
