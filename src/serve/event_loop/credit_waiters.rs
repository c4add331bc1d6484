//! Channels of a loop that lack credit.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, TryReserveError, VecDeque};
use std::mem;
use std::time::Instant;

/// Looking at a channel is useful only after its peer has answered or a pause is over. This tracks both, so its cost
/// does not grow with the number of channels that wait.
#[derive(Default)]
pub(super) struct CreditWaiters {
    count: usize,
    /// Channels to look at now. Some may have credit already, as in `pauses`.
    due: VecDeque<u32>,
    pauses: BinaryHeap<Reverse<(Instant, u32)>>,
    places: Vec<Places>,
}

#[derive(Clone, Copy, Default)]
struct Places {
    due: bool,
    pauses: bool,
}

pub(super) enum Look {
    Found,
    /// A question is in flight, or nothing waits for credit.
    Leave,
    Pause(Instant),
}

impl CreditWaiters {
    /// Allocates all memory that the other methods need.
    pub(super) fn reserve(&mut self, channels: usize) -> Result<(), TryReserveError> {
        self.due.try_reserve(channels - self.due.len())?;
        self.pauses.try_reserve(channels - self.pauses.len())?;
        self.places.try_reserve(channels - self.places.len())?;
        self.places.resize(channels, Places::default());
        Ok(())
    }

    pub(super) fn any(&self) -> bool {
        self.count > 0
    }

    pub(super) fn is_due(&self) -> bool {
        self.any() && !self.due.is_empty()
    }

    pub(super) fn next_pause(&self) -> Option<(Instant, u32)> {
        self.pauses.peek().map(|pause| pause.0).filter(|_| self.any())
    }

    /// Notes a refused post. `is_new`: the channel did not lack credit before.
    pub(super) fn refused(&mut self, channel: u32, is_new: bool, ask_at: Option<Instant>) {
        self.count += usize::from(is_new);
        if let Some(at) = ask_at {
            self.pause(channel, at);
        }
    }

    pub(super) fn answered(&mut self, channel: u32) {
        if let Some(places) = self.places.get_mut(channel as usize)
            && !mem::replace(&mut places.due, true)
        {
            self.due.push_back(channel);
        }
    }

    fn pause(&mut self, channel: u32, at: Instant) {
        if let Some(places) = self.places.get_mut(channel as usize)
            && !mem::replace(&mut places.pauses, true)
        {
            self.pauses.push(Reverse((at, channel)));
        }
    }

    pub(super) fn forget(&mut self, channel: u32) {
        self.count -= 1;
        if self.due.front() == Some(&channel) {
            self.due.pop_front();
            self.places[channel as usize].due = false;
        }
    }

    /// Returns the same channel until it is forgotten.
    pub(super) fn next(
        &mut self,
        now: Option<Instant>,
        mut look: impl FnMut(u32) -> Look,
    ) -> Option<u32> {
        if !self.any() {
            return None;
        }
        while let Some(&Reverse((at, channel))) = self.pauses.peek()
            && now.is_some_and(|now| at <= now)
        {
            self.pauses.pop();
            self.places[channel as usize].pauses = false;
            self.answered(channel);
        }
        while let Some(&channel) = self.due.front() {
            let found = look(channel);
            if let Look::Found = found {
                return Some(channel);
            }
            self.due.pop_front();
            self.places[channel as usize].due = false;
            if let Look::Pause(at) = found {
                self.pause(channel, at);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const CHANNELS: u32 = if cfg!(miri) { 100 } else { 10_000 };

    fn waiters() -> CreditWaiters {
        let mut waiters = CreditWaiters::default();
        waiters.reserve(CHANNELS as usize).unwrap();
        waiters
    }

    #[test]
    fn a_call_looks_only_at_channels_whose_peers_have_answered() {
        let mut waiters = waiters();
        (0..CHANNELS).for_each(|channel| waiters.refused(channel, true, None));
        let never = |_| -> Look { panic!("a look at a channel with a question in flight") };
        assert_eq!(waiters.next(None, never), None);
        for channel in [7, 3, 7, 50] {
            waiters.answered(channel);
        }
        let mut looks = Vec::new();
        let found = waiters.next(None, |channel| {
            looks.push(channel);
            if channel == 3 { Look::Found } else { Look::Leave }
        });
        assert_eq!((found, looks), (Some(3), vec![7, 3]));
        assert_eq!(waiters.next(None, |_| Look::Found), Some(3));
        waiters.forget(3);
        assert_eq!(waiters.next(None, |_| Look::Found), Some(50));
        waiters.forget(50);
        assert_eq!(waiters.next(None, never), None);
        assert!(waiters.any() && !waiters.is_due());
    }

    #[test]
    fn pauses_end_in_order_and_each_takes_one_look() {
        let mut waiters = waiters();
        let start = Instant::now();
        let end = |channel| start + Duration::from_micros(u64::from(channel * 7919 % CHANNELS));
        for channel in 0..CHANNELS {
            waiters.refused(channel, true, Some(end(channel)));
            waiters.refused(channel, false, Some(end(channel)));
        }
        assert_eq!(waiters.next_pause().unwrap().0, start);
        let mut looks = 0;
        for step in 0..CHANNELS {
            let now = start + Duration::from_micros(step.into());
            let found = waiters.next(Some(now), |channel| {
                looks += 1;
                assert_eq!(end(channel), now);
                if channel % 2 == 0 {
                    Look::Leave
                } else {
                    Look::Pause(now + Duration::from_secs(1))
                }
            });
            assert_eq!(found, None);
        }
        assert_eq!(looks, CHANNELS);
        assert_eq!(waiters.pauses.len() as u32, CHANNELS / 2);
        assert!(waiters.next_pause().unwrap().0 >= start + Duration::from_secs(1));
    }

    #[test]
    fn a_channel_is_in_each_place_once_whatever_happens() {
        let mut waiters = waiters();
        let now = Instant::now();
        let mut lacks = [false; 50];
        let mut state = 1_u32;
        for _ in 0..if cfg!(miri) { 300 } else { 100_000 } {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let channel = (state >> 8) % 50;
            let its = &mut lacks[channel as usize];
            match state >> 30 {
                0 => waiters.refused(channel, !mem::replace(its, true), Some(now)),
                1 if *its => waiters.answered(channel),
                2 if mem::take(its) => waiters.forget(channel),
                _ => {
                    let found = waiters.next(Some(now), |channel| {
                        if lacks[channel as usize] { Look::Found } else { Look::Leave }
                    });
                    if let Some(found) = found {
                        assert!(mem::take(&mut lacks[found as usize]));
                        waiters.forget(found);
                    }
                }
            }
            assert!(waiters.due.len() <= 50 && waiters.pauses.len() <= 50);
            assert_eq!(waiters.count, lacks.iter().filter(|lacks| **lacks).count());
        }
    }
}
