//! A line of tasks that wait for the same thing.

use std::collections::VecDeque;
use std::task::Waker;

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

    pub(super) fn remove(&mut self, ticket: u64) {
        if let Some(position) = self.position(ticket) {
            self.waiting.remove(position);
        }
    }

    /// From now on, this waker is woken.
    pub(super) fn set_waker(&mut self, ticket: u64, waker: &Waker) {
        if let Some(position) = self.position(ticket) {
            let place = &mut self.waiting[position].1;
            if !place.as_ref().is_some_and(|same| same.will_wake(waker)) {
                *place = Some(waker.clone());
            }
        }
    }

    /// From now on, no waker of this place is woken.
    pub(super) fn clear_waker(&mut self, ticket: u64) {
        if let Some(position) = self.position(ticket) {
            self.waiting[position].1 = None;
        }
    }

    /// Wakes the first one that was not woken yet.
    #[inline]
    pub(super) fn wake_first(&mut self, wakers: &mut Vec<Waker>) {
        if self.is_empty() {
            return;
        }
        wakers.extend(self.waiting.iter_mut().find_map(|(_, waker)| waker.take()));
    }

    pub(super) fn wake_all(&mut self, wakers: &mut Vec<Waker>) {
        wakers.extend(self.waiting.iter_mut().filter_map(|(_, waker)| waker.take()));
    }
}
