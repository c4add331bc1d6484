//! Decides what a device's thread does next from what it has seen.
//!
//! A thread that is awake receives packets: the device's own thread, a helper or a loop of the program, or a program
//! that polls. [`next`] decides which of them it is, and when the device's thread looks again.

use crate::link::Time;

/// A program counts as polling all the time once it has polled empty queues this often without arming one.
pub(super) const MANY_POLLS: u32 = 64;

/// A program still counts as polling while it polls at least this often in each `POLLED_FOR`, in nanoseconds.
pub(super) const FEW_POLLS: u32 = 8;
pub(super) const POLLED_FOR: Time = 1_000_000;

/// The longest that the device's thread leaves packets to threads that sleep for them, in nanoseconds.
pub(super) const LEFT_FOR: Time = 4_000_000;

/// The receiver of the packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// The device's thread, which sleeps until they come.
    Asleep,
    /// A helper or a loop that comes back again and again. The device's thread looks after this time, twice as long after each
    /// look in vain: its look takes a processor from the threads that exchange messages.
    Helped(Time),
    /// A program that polls all the time. Nobody is woken for packets, which would only take the processor from it.
    Polled,
}

impl State {
    /// Packs the state into one number, which other threads read.
    pub(super) fn pack(self) -> Time {
        match self {
            Self::Asleep => 0,
            Self::Polled => 1,
            Self::Helped(leaves_for) => leaves_for,
        }
    }

    pub(super) fn unpack(number: Time) -> Self {
        match number {
            0 => Self::Asleep,
            1 => Self::Polled,
            leaves_for => Self::Helped(leaves_for),
        }
    }

    /// How long packets, and acknowledgements that were held back, are left to others.
    pub(super) fn leaves_for(self) -> Time {
        match self {
            Self::Helped(leaves_for) => leaves_for,
            Self::Asleep | Self::Polled => POLLED_FOR,
        }
    }
}

/// Observations of the device's thread at a look.
#[derive(Clone, Copy, Debug)]
pub(super) struct Seen {
    pub(super) now: Time,
    /// The end of its sleep, if it was not woken before.
    pub(super) slept_until: Time,
    /// When a timer is due; `Time::MAX` for none.
    pub(super) due: Time,
    /// Empty polls since the last look, or since the program has armed a queue.
    pub(super) polls: u32,
    /// A helper sleeps at the moment.
    pub(super) helps: bool,
    /// A helper has begun to sleep since the last look, or a loop has received.
    pub(super) helped: bool,
    /// Something waited for this look: packets, acknowledgements, or queue pairs with more to send.
    pub(super) waited: bool,
}

/// The thread's work until the next look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Action {
    pub(super) state: State,
    /// When it looks again; `Time::MAX`: when it is woken.
    pub(super) sleeps_until: Time,
    /// Packets of this machine wake the thread. Otherwise they wake others.
    pub(super) listens: bool,
    /// The polls were looked at.
    pub(super) counts_again: bool,
}

impl Action {
    /// Before the first look: the thread looks at once.
    pub(super) fn first() -> Self {
        Self { state: State::Asleep, sleeps_until: 0, listens: true, counts_again: false }
    }
}

/// Decides, from what was decided before.
pub(super) fn next(state: State, seen: Seen) -> Action {
    let enough = if state == State::Polled { FEW_POLLS } else { MANY_POLLS };
    let is_polled = seen.polls >= enough;
    let leaves_for = match state {
        State::Helped(before) if !seen.waited => (2 * before).min(LEFT_FOR),
        _ => POLLED_FOR,
    };
    let (next, looks_at) = if is_polled {
        (State::Polled, seen.now + POLLED_FOR)
    } else if seen.helped {
        (State::Helped(leaves_for), seen.now + leaves_for)
    } else {
        (State::Asleep, Time::MAX)
    };
    let due = seen.due.min(looks_at);
    Action {
        state: next,
        // A wake-up that was due anyway is kept: then the next request need not wake the thread.
        sleeps_until: if seen.slept_until > seen.now { due.min(seen.slept_until) } else { due },
        listens: next == State::Asleep && !seen.helps,
        counts_again: is_polled || state == State::Polled,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEVER: Time = Time::MAX;
    const NOW: Time = 10_000_000;

    const QUIET: Seen = Seen {
        now: NOW,
        slept_until: 0,
        due: NEVER,
        polls: 0,
        helps: false,
        helped: false,
        waited: false,
    };

    fn polls(polls: u32) -> Seen {
        Seen { polls, ..QUIET }
    }

    const HELPED: Seen = Seen { helped: true, ..QUIET };

    #[test]
    fn each_state_follows_from_what_was_seen() {
        use State::{Asleep, Helped, Polled};
        let (short, long) = (Helped(POLLED_FOR), Helped(LEFT_FOR));
        let soon = NOW + POLLED_FOR;
        for (before, seen, after, sleeps_until, listens) in [
            (Asleep, QUIET, Asleep, NEVER, true),
            (Asleep, Seen { due: 7, ..QUIET }, Asleep, 7, true),
            // Polls: many to begin, few to go on.
            (Asleep, polls(MANY_POLLS - 1), Asleep, NEVER, true),
            (Asleep, polls(MANY_POLLS), Polled, soon, false),
            (Polled, polls(FEW_POLLS), Polled, soon, false),
            (Polled, polls(FEW_POLLS - 1), Asleep, NEVER, true),
            (short, polls(FEW_POLLS), Asleep, NEVER, true),
            (short, polls(MANY_POLLS), Polled, soon, false),
            // A helper sleeps: it is woken, and the thread looks when it leaves.
            (Asleep, Seen { helps: true, ..QUIET }, Asleep, NEVER, false),
            // One comes back: the thread looks less often while that is in vain.
            (Asleep, HELPED, short, soon, false),
            (short, HELPED, Helped(2 * POLLED_FOR), NOW + 2 * POLLED_FOR, false),
            (long, HELPED, long, NOW + LEFT_FOR, false),
            (long, Seen { waited: true, ..HELPED }, short, soon, false),
            (long, QUIET, Asleep, NEVER, true),
            (Polled, HELPED, short, soon, false),
            // A program that polls and sleeps in turn counts as polling.
            (Polled, Seen { polls: FEW_POLLS, ..HELPED }, Polled, soon, false),
            // A timer that is due before the look, and a wake-up that was due anyway.
            (Asleep, Seen { due: NOW + 1, ..HELPED }, short, NOW + 1, false),
            (Asleep, Seen { slept_until: NOW + 5, ..QUIET }, Asleep, NOW + 5, true),
            (Asleep, Seen { slept_until: NOW - 5, ..QUIET }, Asleep, NEVER, true),
        ] {
            let action = next(before, seen);
            let expected = (after, sleeps_until, listens);
            let found = (action.state, action.sleeps_until, action.listens);
            assert_eq!(found, expected, "{before:?}, {seen:?}");
            let looked = after == Polled || before == Polled;
            assert_eq!(action.counts_again, looked, "{before:?}, {seen:?}");
        }
    }

    /// In every state each packet is received in the end: by the device's thread, by a helper, or at the next look.
    #[test]
    fn somebody_always_receives() {
        let all =
            [State::Asleep, State::Polled, State::Helped(POLLED_FOR), State::Helped(LEFT_FOR)];
        for state in all {
            assert_eq!(State::unpack(state.pack()), state);
            for bits in 0..8 {
                for count in [0, FEW_POLLS, MANY_POLLS] {
                    let (helps, helped, waited) = (bits & 1 != 0, bits & 2 != 0, bits & 4 != 0);
                    let action = next(state, Seen { helps, helped, waited, ..polls(count) });
                    let looks = action.sleeps_until <= NOW + LEFT_FOR;
                    assert!(
                        action.listens || looks || helps,
                        "{state:?}, {helps} {helped} {waited}"
                    );
                    assert!(action.state.leaves_for() >= POLLED_FOR);
                }
            }
        }
    }
}
