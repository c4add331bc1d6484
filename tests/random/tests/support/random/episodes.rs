//! The parts of a random program on channels.

use proptest::collection::vec;
use proptest::prelude::*;

use super::operations::How;
use super::scoped::{SLOTS, Step};

/// A scope with its steps, or an operation between two scopes.
#[derive(Clone, Debug)]
pub(crate) enum Episode {
    Scope {
        steps: Vec<(usize, Step)>,
        exit: Exit,
    },
    Send {
        side: usize,
        slot: usize,
    },
    Receive {
        side: usize,
        slot: usize,
    },
    /// Asks for the result of work that was posted outside of a scope, waits for it, or drops it.
    Poll {
        side: usize,
        which: prop::sample::Index,
    },
    Wait {
        side: usize,
        which: prop::sample::Index,
    },
    Abandon {
        side: usize,
        which: prop::sample::Index,
    },
    Reset,
    Replace {
        how: [How; 2],
    },
}

/// How a scope's closure ends.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Exit {
    Success,
    /// Succeeds after it has waited for everything.
    Manual,
    Failure,
    Panic,
}

fn step() -> impl Strategy<Value = Step> {
    let at = any::<prop::sample::Index>;
    prop_oneof![
        8 => Just(Step::Send),
        9 => Just(Step::Receive),
        3 => at().prop_map(Step::Poll),
        3 => at().prop_map(Step::SpinPoll),
        8 => at().prop_map(Step::Wait),
        1 => at().prop_map(Step::Drop),
        1 => at().prop_map(Step::Forget),
        1 => (any::<bool>(), 1..3_u32).prop_map(|(poll, times)| Step::Disturb { poll, times }),
    ]
}

fn episode(forgetting: bool) -> impl Strategy<Value = Episode> {
    let at = any::<prop::sample::Index>;
    let how = move || {
        let last = if forgetting { How::Forget } else { How::Drop };
        prop_oneof![Just(How::Drop), Just(How::Close), Just(last)]
    };
    let exit = prop_oneof![
        4 => Just(Exit::Success),
        4 => Just(Exit::Manual),
        1 => Just(Exit::Failure),
        1 => Just(Exit::Panic),
    ];
    let side = || 0..2_usize;
    prop_oneof![
        8 => (vec((side(), step()), 0..30), exit)
            .prop_map(|(steps, exit)| Episode::Scope { steps, exit }),
        4 => (side(), 0..SLOTS).prop_map(|(side, slot)| Episode::Send { side, slot }),
        5 => (side(), 0..SLOTS).prop_map(|(side, slot)| Episode::Receive { side, slot }),
        4 => (side(), at()).prop_map(|(side, which)| Episode::Poll { side, which }),
        2 => (side(), at()).prop_map(|(side, which)| Episode::Wait { side, which }),
        1 => (side(), at()).prop_map(|(side, which)| Episode::Abandon { side, which }),
        6 => Just(Episode::Reset),
        1 => [how(), how()].prop_map(|how| Episode::Replace { how }),
    ]
}

/// Programs of up to `most` episodes, and the end of the channels.
pub(crate) fn programs(
    forgetting: bool,
    most: usize,
) -> impl Strategy<Value = (Vec<Episode>, [How; 2])> {
    let last = if forgetting { How::Forget } else { How::Close };
    let how = prop_oneof![Just(How::Drop), Just(last)];
    (vec(episode(forgetting), 1..=most), [how.clone(), how])
}
