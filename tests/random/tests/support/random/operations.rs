//! The operations of a random program.

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::Index;

/// One step. Its objects are picked among those that exist; without any, the step is skipped.
#[derive(Clone, Debug)]
pub(crate) enum Operation {
    Context {
        side: usize,
    },
    Domain {
        context: Index,
    },
    Queue {
        context: Index,
    },
    Region {
        domain: Index,
    },
    /// A link: two queue pairs for each other, in these domains.
    Link {
        domains: [Index; 2],
        queues: [Index; 4],
    },
    /// Connects the two, after a reset if they were connected or are in error.
    Connect {
        link: Index,
    },
    Receive {
        end: Index,
        region: Index,
        short: bool,
    },
    Send {
        end: Index,
        region: Index,
        len: usize,
        signaled: bool,
    },
    Write {
        end: Index,
        region: Index,
        block: usize,
        signaled: bool,
    },
    Read {
        end: Index,
        region: Index,
        block: usize,
    },
    Poll {
        queue: Index,
        room: usize,
    },
    /// Lets the devices execute requests.
    Run,
    /// Takes the queue pair to RESET.
    Reset {
        end: Index,
    },
    /// Takes the queue pair to ERR.
    Fail {
        end: Index,
    },
    /// Posts in a state before RTS, and takes back with a reset what that has queued.
    Early {
        end: Index,
        region: Index,
        state: usize,
    },
    /// Posts while the send queue is drained, and resumes it.
    Drained {
        end: Index,
        region: Index,
    },
    /// Makes a completion queue larger, or fails to.
    Resize {
        queue: Index,
        entries: u32,
        fails: bool,
    },
    End {
        what: What,
        which: Index,
        how: How,
    },
}

/// The kind of object that is ended.
#[derive(Clone, Copy, Debug)]
pub(crate) enum What {
    Context,
    Domain,
    Queue,
    Region,
    QueuePair,
}

/// How it is ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum How {
    Drop,
    Close,
    Forget,
    /// Closed, and the destroy verb fails.
    Fail,
}

/// A whole program.
#[derive(Clone, Debug)]
pub(crate) struct Program {
    pub(crate) operations: Vec<Operation>,
    /// The order in which the remaining objects end.
    pub(crate) ends: Vec<(Index, How)>,
}

fn how(forgetting: bool) -> impl Strategy<Value = How> {
    prop_oneof![
        3 => Just(How::Drop),
        2 => Just(How::Close),
        u32::from(forgetting) * 2 + 1 =>
            Just(if forgetting { How::Forget } else { How::Drop }),
        u32::from(forgetting) + 1 =>
            Just(if forgetting { How::Fail } else { How::Close }),
    ]
}

fn operation(forgetting: bool) -> impl Strategy<Value = Operation> {
    use Operation as O;

    let at = any::<Index>;
    let what = prop_oneof![
        1 => Just(What::Context),
        1 => Just(What::Domain),
        1 => Just(What::Queue),
        3 => Just(What::Region),
        3 => Just(What::QueuePair),
    ];
    prop_oneof![
        1 => (0..2_usize).prop_map(|side| O::Context { side }),
        1 => at().prop_map(|context| O::Domain { context }),
        1 => at().prop_map(|context| O::Queue { context }),
        3 => at().prop_map(|domain| O::Region { domain }),
        2 => (any::<[Index; 2]>(), any::<[Index; 4]>())
            .prop_map(|(domains, queues)| O::Link { domains, queues }),
        3 => at().prop_map(|link| O::Connect { link }),
        16 => (at(), at(), prop::bool::weighted(0.03))
            .prop_map(|(end, region, short)| O::Receive { end, region, short }),
        16 => (at(), at(), 0..=super::world::LEN, any::<bool>())
            .prop_map(|(end, region, len, signaled)| O::Send { end, region, len, signaled }),
        6 => (at(), at(), 0..super::world::BLOCKS, any::<bool>())
            .prop_map(|(end, region, block, signaled)| O::Write { end, region, block, signaled }),
        6 => (at(), at(), 0..super::world::BLOCKS)
            .prop_map(|(end, region, block)| O::Read { end, region, block }),
        20 => (at(), 0..5_usize).prop_map(|(queue, room)| O::Poll { queue, room }),
        4 => Just(O::Run),
        1 => at().prop_map(|end| O::Reset { end }),
        1 => at().prop_map(|end| O::Fail { end }),
        2 => (at(), at(), 0..3_usize)
            .prop_map(|(end, region, state)| O::Early { end, region, state }),
        1 => (at(), at()).prop_map(|(end, region)| O::Drained { end, region }),
        1 => (at(), super::world::DEPTH..1000, any::<bool>())
            .prop_map(|(queue, entries, fails)| O::Resize { queue, entries, fails }),
        3 => (what, at(), how(forgetting))
            .prop_map(|(what, which, how)| O::End { what, which, how }),
    ]
}

/// Programs of up to `most` operations. If `forgetting`, some of them forget objects.
pub(crate) fn programs(forgetting: bool, most: usize) -> impl Strategy<Value = Program> {
    let ends = vec((any::<Index>(), how(forgetting)), 32);
    (vec(operation(forgetting), 1..=most), ends)
        .prop_map(|(operations, ends)| Program { operations, ends })
}
