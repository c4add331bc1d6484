//! Loom tests of threads that sleep for a queue's events, and of threads that poll an extended queue.

use loom::cell::UnsafeCell;
use std::sync::PoisonError;
use std::time::Instant;

use super::extended_completion::OnePoller;
use super::waiters::{Read, Waiters};
use super::waker::Waker;
use crate::base::{
    ErrorKind, Result,
    sync::{Condvar, Mutex, MutexGuard, in_every_order},
};
use crate::verbs::device::event_file;

/// The state that provider and kernel have.
struct Device {
    queue: Mutex<Queue>,
    readable: Condvar,
    waiters: Waiters,
}

#[derive(Default)]
struct Queue {
    completions: u32,
    armed: bool,
    events: u32,
    /// Packets of a software device, which any thread receives.
    packets: u32,
    /// The completions that all threads have taken.
    taken: u32,
}

impl Device {
    fn new() -> Self {
        let (queue, readable) = (Mutex::default(), Condvar::new());
        Self { queue, readable, waiters: Waiters::new("ibv_x") }
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn complete(&self) {
        let mut queue = self.queue();
        queue.completions += 1;
        if std::mem::take(&mut queue.armed) {
            queue.events += 1;
            assert_eq!(queue.events, 1, "events pile up");
            drop(queue);
            self.readable.notify_all();
        }
    }

    fn poll(&self) -> Result<Option<()>> {
        let mut queue = self.queue();
        let found = queue.completions > 0;
        queue.completions -= u32::from(found);
        queue.taken += u32::from(found);
        Ok(found.then_some(()))
    }

    fn arm(&self) -> Result<()> {
        self.queue().armed = true;
        Ok(())
    }

    fn arrive(&self) {
        self.queue().packets += 1;
        self.readable.notify_all();
    }

    fn receive(&self) {
        let packets = std::mem::take(&mut self.queue().packets);
        (0..packets).for_each(|_| self.complete());
    }

    /// With `give_up`, times out if there is nothing to read.
    fn read(&self, give_up: bool) -> Result<Read> {
        let mut queue = self.queue();
        while queue.events == 0 {
            if queue.packets > 0 {
                queue.completions += std::mem::take(&mut queue.packets);
                return Ok(Read::Early);
            }
            if give_up {
                return Err(event_file::timed_out("ibv_x"));
            }
            queue = self.readable.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
        queue.events -= 1;
        Ok(Read::Event)
    }

    fn sleep(&self, give_up: bool) -> Result<()> {
        let deadline = give_up.then(Instant::now);
        let read = |_: Option<&Waker>| self.read(give_up);
        self.waiters.sleep_until(deadline, || self.poll(), || false, || self.arm(), read)
    }
}

#[test]
fn no_wake_up_is_lost() {
    let sleeper = |device: &Device| device.sleep(false).unwrap();
    let device = |device: &Device| (0..3).for_each(|_| device.complete());
    let poller = |device: &Device| assert!(device.poll().is_ok());
    let threads: [fn(&Device); 4] = [sleeper, sleeper, device, poller];
    let runs = in_every_order(Device::new, threads, |device| {
        let queue = device.queue();
        assert_eq!(queue.taken + queue.completions, 3);
        assert!(queue.taken >= 2);
    });
    assert!(runs > 100, "{runs}");
}

/// Another thread may receive the packets first.
#[test]
fn no_wake_up_is_lost_if_a_sleeper_receives() {
    let sleeper = |device: &Device| device.sleep(false).unwrap();
    let wire = |device: &Device| (0..2).for_each(|_| device.arrive());
    let other = |device: &Device| device.receive();
    let runs = in_every_order(Device::new, [sleeper, sleeper, wire, other], |device| {
        assert_eq!(device.queue().taken, 2);
    });
    assert!(runs > 100, "{runs}");
}

#[test]
fn no_wake_up_is_lost_if_a_sleeper_gives_up() {
    let sleeper = |device: &Device| device.sleep(false).unwrap();
    let hasty = |device: &Device| {
        if let Err(error) = device.sleep(true) {
            assert_eq!(error.kind(), ErrorKind::TimedOut);
        }
    };
    let device = |device: &Device| (0..2).for_each(|_| device.complete());
    let runs = in_every_order(Device::new, [hasty, sleeper, device], |device| {
        let queue = device.queue();
        assert!(queue.taken >= 1 && queue.taken + queue.completions == 2);
    });
    assert!(runs > 100, "{runs}");
}

/// Without a lock of the provider: loom reports two threads that use it at once.
struct Extended {
    poller: OnePoller,
    polls: UnsafeCell<u32>,
}

// SAFETY: the number is used by the only poller.
unsafe impl Sync for Extended {}

#[test]
fn pollers_come_one_after_the_other() {
    let new = || Extended { poller: OnePoller::default(), polls: UnsafeCell::new(0) };
    let poll = |queue: &Extended| {
        if queue.poller.begin() {
            // SAFETY: there is no other poller.
            queue.polls.with_mut(|polls| unsafe { *polls += 1 });
            queue.poller.end();
        }
    };
    let runs = in_every_order(new, [poll, poll, poll], |queue| {
        // SAFETY: no other thread is left.
        let polls = queue.polls.with(|polls| unsafe { *polls });
        assert!(queue.poller.begin() && (1..=3).contains(&polls));
    });
    assert!(runs > 10, "{runs}");
}
