//! Futures that wait for a channel and are dropped, in every order of their threads.

use std::sync::Arc;
use std::task::{Wake, Waker};

use super::handover::{Cancelled, Handover, Settle};
use super::line::Line;
use crate::channel::Later;
use crate::sync::{AtomicBool, Condvar, Mutex, Ordering, in_every_order};

/// A send queue, as far as futures wait for it.
struct Room {
    free: u32,
    line: Line,
    later: Vec<Later>,
    /// Whether the future of an operation that has ended was dropped.
    dropped: Arc<AtomicBool>,
}

impl Room {
    fn wake_first(&mut self) {
        self.line.wake_first(&mut self.later);
    }
}

impl Settle for Room {
    fn settle(&mut self, places: impl Iterator<Item = Cancelled>) {
        // As a channel looks for it.
        let dropped =
            self.dropped.load(Ordering::Relaxed) && self.dropped.swap(false, Ordering::Acquire);
        self.free += u32::from(dropped);
        self.wake_first();
        for place in places {
            if let Cancelled::Room(ticket) = place {
                self.line.remove(ticket, &mut self.later);
                self.wake_first();
            }
        }
    }

    fn later(&mut self) -> &mut Vec<Later> {
        &mut self.later
    }
}

/// A task that is the only one of its thread.
#[derive(Default)]
struct Task {
    woken: Mutex<bool>,
    changed: Condvar,
}

impl Task {
    fn sleep(&self) {
        let mut woken = self.woken.lock().unwrap();
        while !*woken {
            woken = self.changed.wait(woken).unwrap();
        }
        *woken = false;
    }
}

impl Wake for Task {
    fn wake(self: Arc<Self>) {
        *self.woken.lock().unwrap() = true;
        self.changed.notify_all();
    }
}

struct World {
    handover: Handover<Room>,
    dropped: Arc<AtomicBool>,
}

impl World {
    fn new(free: u32) -> Self {
        let dropped = Arc::new(AtomicBool::new(false));
        let line = Line::default();
        let room = Room { free, line, later: Vec::new(), dropped: dropped.clone() };
        Self { handover: Handover::new(room), dropped }
    }

    /// As an operation when it is polled: returns false if it is not its turn, or there is no room.
    fn poll(&self, ticket: &mut Option<u64>, waker: &Waker) -> bool {
        let mut guard = self.handover.lock();
        let room = &mut *guard;
        let is_next = match *ticket {
            Some(ticket) => room.line.is_first(ticket),
            None => room.line.is_empty(),
        };
        let posted = is_next && room.free > 0;
        if posted {
            room.free -= 1;
            if let Some(ticket) = ticket.take() {
                room.line.remove(ticket, &mut room.later);
                room.wake_first();
            }
        } else {
            match *ticket {
                Some(ticket) => room.line.set_waker(ticket, waker, &mut room.later),
                None => *ticket = Some(room.line.join(waker)),
            }
        }
        self.handover.release(guard, None);
        posted
    }

    /// A task that waits until its operation is posted.
    fn post(&self) {
        let (task, mut ticket) = (Arc::new(Task::default()), None);
        let waker = Waker::from(task.clone());
        while !self.poll(&mut ticket, &waker) {
            task.sleep();
        }
    }

    /// A task that drops its future after the first poll.
    fn give_up(&self) {
        let mut ticket = None;
        let posted = self.poll(&mut ticket, &Waker::from(Arc::new(Task::default())));
        if posted {
            // As a channel marks it.
            self.dropped.swap(true, Ordering::Release);
        }
        self.handover.cancel(ticket.map(Cancelled::Room));
    }

    /// The completion of another operation.
    fn complete(&self) {
        let mut room = self.handover.lock();
        room.free += 1;
        room.wake_first();
        self.handover.release(room, None);
    }

    /// Nobody waits, and nothing is left.
    fn check(&self, free: u32) {
        let room = self.handover.lock();
        assert_eq!((room.free, room.line.len(), room.later.len()), (free, 0, 0));
        assert!(self.handover.cancelled.lock().unwrap().is_empty());
        assert!(!self.handover.any_cancelled.load(Ordering::SeqCst));
        assert!(!self.dropped.load(Ordering::SeqCst));
    }
}

/// The future that is dropped may be the one that was woken.
#[test]
fn a_dropped_future_takes_no_wake_up_with_it() {
    let threads = [World::post, World::give_up, World::complete];
    let runs = in_every_order(|| World::new(0), threads, |world| world.check(0));
    assert!(runs > 100, "{runs}");
    let threads = [World::give_up, World::post, World::give_up, World::complete];
    in_every_order(|| World::new(0), threads, |world| world.check(0));
}

#[test]
fn tasks_in_line_are_woken_one_by_one() {
    let twice = |world: &World| {
        world.complete();
        world.complete();
    };
    let threads = [World::post, World::post, twice];
    in_every_order(|| World::new(1), threads, |world| world.check(1));
}
