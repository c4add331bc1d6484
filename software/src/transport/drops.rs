//! Packets that are dropped in silence for a reason that a program can mend.

use std::collections::BTreeSet;
use std::net::IpAddr;

use super::counters::Counters;

/// Why a packet is dropped: the sender does not learn it, or only that no answer comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum DropReason {
    NoReceive,
    TooShort,
    QKey,
    Memory,
    Mtu,
    State,
    NoQueuePair,
    Transport,
    Peer,
    Partition,
    NoGroup,
    GroupNumber,
    Management,
}

impl DropReason {
    /// Returns the reason as text, and the counter of its kind.
    pub(super) fn explain(self, counters: &mut Counters) -> (&'static str, &mut u64) {
        match self {
            Self::NoReceive => ("no receive is posted", &mut counters.dropped_without_receive),
            Self::TooShort => (
                "the receive is too short (that of a datagram needs 40 bytes more than the data)",
                &mut counters.dropped_too_long,
            ),
            Self::QKey => ("it has another Q_Key", &mut counters.dropped_wrong_key),
            Self::Memory => (
                "the R_Key, or the access flags of the region or the queue pair, do not allow the write",
                &mut counters.dropped_wrong_key,
            ),
            Self::Mtu => (
                "its length does not fit the MTU of the queue pair",
                &mut counters.dropped_wrong_mtu,
            ),
            Self::State => (
                "the queue pair receives nothing before RTR, and nothing in ERR",
                &mut counters.dropped_wrong_state,
            ),
            Self::NoQueuePair => {
                ("there is no such queue pair", &mut counters.dropped_without_queue_pair)
            }
            Self::Management => (
                "no connection or listener of the connection manager expects it",
                &mut counters.dropped_without_queue_pair,
            ),
            Self::Transport => {
                ("the queue pair is of another transport", &mut counters.dropped_without_queue_pair)
            }
            Self::Peer => (
                "the queue pair is connected to another address, or to that one from another of its own",
                &mut counters.dropped_wrong_peer,
            ),
            Self::Partition => {
                ("it is of another partition", &mut counters.dropped_wrong_partition)
            }
            Self::NoGroup => (
                "no queue pair is attached to the multicast group",
                &mut counters.dropped_without_group,
            ),
            Self::GroupNumber => (
                "what is sent to a multicast group is for queue pair 0xffffff",
                &mut counters.dropped_without_group,
            ),
        }
    }
}

/// How many kinds are told at the most: a peer chooses the numbers of queue pairs.
const MOST: usize = 4096;

/// The reasons that were reported already.
#[derive(Debug, Default)]
pub(crate) struct Told(BTreeSet<(u32, DropReason)>);

impl Told {
    /// Counts a packet that was sent to a queue pair of this number. If `tells`, the first of a kind and queue pair is a
    /// line on standard error.
    pub(super) fn count(
        &mut self,
        counters: &mut Counters,
        tells: bool,
        (from, number): (IpAddr, u32),
        why: DropReason,
    ) {
        let (text, counter) = why.explain(counters);
        *counter += 1;
        if tells && self.0.len() < MOST && self.0.insert((number, why)) {
            crate::say(format_args!(
                "ibverbs-software: queue pair {number:#x}: dropped a packet from {from}: {text} (said once)"
            ));
        }
    }
}
