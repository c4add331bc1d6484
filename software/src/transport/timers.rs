//! Timers.
//!
//! Every packet sets timers or moves them later, and they hardly ever fire. So moving a timer later does not
//! change its entry in the ordered set: when the entry is due, its object compares the time with its own
//! deadline, and sets the timer again if that is later.

use std::collections::BTreeSet;

use crate::link::Time;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Timer {
    /// A queue pair's retries.
    QueuePair(u32),
    /// A completion queue's moderated event.
    CompletionQueue(u32),
    /// Events that did not fit into their file.
    Events,
    /// Packets that there was no room for.
    Link,
}

#[derive(Debug, Default)]
pub(crate) struct Timers {
    entries: BTreeSet<(Time, Timer)>,
}

impl Timers {
    /// Schedules `timer` for `at` or earlier. `scheduled` is the object's copy of the scheduled time.
    pub(crate) fn set(&mut self, timer: Timer, at: Time, scheduled: &mut Option<Time>) {
        match *scheduled {
            Some(already) if already <= at => return,
            Some(already) => {
                self.entries.remove(&(already, timer));
            }
            None => {}
        }
        self.entries.insert((at, timer));
        *scheduled = Some(at);
    }

    pub(crate) fn forget(&mut self, timer: Timer, scheduled: &mut Option<Time>) {
        if let Some(at) = scheduled.take() {
            self.entries.remove(&(at, timer));
        }
    }

    /// The time at which the next timer is due.
    pub(crate) fn next(&self) -> Option<Time> {
        self.entries.first().map(|entry| entry.0)
    }

    /// Removes a timer that is due.
    pub(crate) fn pop(&mut self, now: Time) -> Option<Timer> {
        let &(at, timer) = self.entries.first()?;
        if at > now {
            return None;
        }
        self.entries.pop_first();
        Some(timer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timer_is_called_at_the_earliest_time_asked_for() {
        let mut timers = Timers::default();
        let (mut a, mut b) = (None, None);
        timers.set(Timer::QueuePair(1), 10, &mut a);
        timers.set(Timer::QueuePair(1), 20, &mut a);
        timers.set(Timer::QueuePair(2), 15, &mut b);
        timers.set(Timer::QueuePair(2), 5, &mut b);
        assert_eq!((timers.next(), a, b), (Some(5), Some(10), Some(5)));
        assert_eq!(timers.pop(4), None);
        assert_eq!(timers.pop(10), Some(Timer::QueuePair(2)));
        assert_eq!(timers.pop(10), Some(Timer::QueuePair(1)));
        assert_eq!(timers.pop(u64::MAX), None);
        timers.set(Timer::Events, 1, &mut None);
        timers.forget(Timer::Events, &mut Some(1));
        assert_eq!(timers.next(), None);
    }
}
