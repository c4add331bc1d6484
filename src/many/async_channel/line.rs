//! A line of tasks that wait for the same thing.

use std::collections::VecDeque;
use std::task::Waker;

use crate::channel::Later;

/// Tasks in the order of their arrival.
#[derive(Default)]
pub(super) struct Line {
    next_ticket: u64,
    /// Tickets in ascending order. The waker is taken when the task is woken.
    waiting: VecDeque<(u64, Option<Waker>)>,
}

impl Line {
    pub(super) fn len(&self) -> usize {
        self.waiting.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Takes the last place, and returns its ticket.
    pub(super) fn join(&mut self, waker: &Waker) -> u64 {
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        self.waiting.push_back((ticket, Some(waker.clone())));
        ticket
    }

    pub(super) fn is_first(&self, ticket: u64) -> bool {
        self.waiting.front().is_some_and(|first| first.0 == ticket)
    }

    fn position(&self, ticket: u64) -> Option<usize> {
        self.waiting.binary_search_by_key(&ticket, |waiting| waiting.0).ok()
    }

    /// Gives a place up. The waker that may be left is dropped later.
    pub(super) fn remove(&mut self, ticket: u64, later: &mut Vec<Later>) {
        if let Some(position) = self.position(ticket) {
            let place = self.waiting.remove(position);
            later.extend(place.and_then(|place| place.1).map(Later::Drop));
        }
    }

    /// From now on, this waker is woken. The one before is dropped later.
    pub(super) fn set_waker(&mut self, ticket: u64, waker: &Waker, later: &mut Vec<Later>) {
        if let Some(position) = self.position(ticket) {
            let place = &mut self.waiting[position].1;
            if !place.as_ref().is_some_and(|same| same.will_wake(waker)) {
                later.extend(place.replace(waker.clone()).map(Later::Drop));
            }
        }
    }

    /// From now on, no waker of this place is woken. It is dropped later.
    pub(super) fn clear_waker(&mut self, ticket: u64, later: &mut Vec<Later>) {
        if let Some(position) = self.position(ticket) {
            later.extend(self.waiting[position].1.take().map(Later::Drop));
        }
    }

    /// Wakes the first one that was not woken yet.
    #[inline]
    pub(super) fn wake_first(&mut self, later: &mut Vec<Later>) {
        if self.is_empty() {
            return;
        }
        let first = self.waiting.iter_mut().find_map(|(_, waker)| waker.take());
        later.extend(first.map(Later::Wake));
    }

    pub(super) fn wake_all(&mut self, later: &mut Vec<Later>) {
        let wakers = self.waiting.iter_mut().filter_map(|(_, waker)| waker.take());
        later.extend(wakers.map(Later::Wake));
    }
}
